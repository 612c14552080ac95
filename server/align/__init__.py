"""`firstlight align`: the product against a reference, operation by operation."""
