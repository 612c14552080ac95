"""Reports as one HTML page each, which needs no network and no script. Used by the commands that check a model."""
