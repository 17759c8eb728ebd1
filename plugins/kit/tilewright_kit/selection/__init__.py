"""Selection of one kernel among the candidates: strategies, measurements, explanations."""
