"""What ``python -m ulysses_op trace`` runs; no other part of the package uses it."""
