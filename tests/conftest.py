"""What must be set before the first test module imports torch."""

import os

# As the supervisor sets it for the engine: threads that spin for work make each other wait where cores are busy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
