"""How the rates of learning change in the course of a training. Used by `encoder.py` and `align.py`."""


def share_of_rate(step: int, steps: int, warmup_steps: int, cooldown: float) -> float:
    """Of the full rate, at one of `steps`: rising linearly at first, and falling in the last share `cooldown`."""
    falling = (steps - step) / max(1, steps * cooldown)
    return max(0.0, min(1.0, (step + 1) / warmup_steps, falling))
