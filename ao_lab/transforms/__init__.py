"""What every change of a model goes through: which layers, the plan, the report, data for calibration, and undoing."""
