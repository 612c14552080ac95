"""`firstlight validate`: whether a model is served rightly on this machine, checked end to end."""
