"""Moving weights from trainers to engines."""
