"""What ``python -m ulysses_op bench`` runs, and whose blocks ``trace`` does; no other part of the package uses it."""
