"""What must be set before the first test module imports torch, and for every property test."""

import os
import signal

from hypothesis import settings

# As the supervisor sets it for the engine: threads that spin for work make each other wait where cores are busy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The same examples in every run, however busy the machine: a property that fails is a fault to mend, not a run to
# repeat. To look for new examples, run with --hypothesis-profile=default.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# Shells let what they start in the background ignore Ctrl-C, and programs pass that on to those that they start: some
# of the commands under test would not hear it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
