"""From a model's answers to metrics: predictions in files, temperatures, scores, thresholds."""
