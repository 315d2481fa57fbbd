"""What ``python -m ulysses_op bench`` runs; no other part of the package uses it."""
