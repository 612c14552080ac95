"""What is wrong with a grammar. Raised where grammars are read and compiled; any process."""


class GrammarError(Exception):
    """A grammar that cannot be obeyed; the message says why and where in it."""
