"""Structured output: grammars of requests, checked in a process of their own, obeyed in the engine process."""
