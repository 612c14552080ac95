"""`firstlight plan`: how a model fits on devices. The plans of steps are something else (`scheduler/plan.py`)."""
