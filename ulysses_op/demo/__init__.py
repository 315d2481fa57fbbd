"""What ``python -m ulysses_op demo`` runs; no other part of the package uses it."""
