"""Trainer `rnn`: a recurrent language model with its vocabulary on parameter servers."""
