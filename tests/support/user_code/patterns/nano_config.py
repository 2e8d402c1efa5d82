learning_rate = 0.02
