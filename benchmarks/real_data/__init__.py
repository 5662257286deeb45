"""Studies on real data: study files, trainers for a CPU, and figures that reports do not have."""
