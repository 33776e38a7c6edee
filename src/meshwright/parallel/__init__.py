"""One file per parallel technique."""
