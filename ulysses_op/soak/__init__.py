"""``python -m ulysses_op soak``: random programs of exchanges, every element of every result checked."""
