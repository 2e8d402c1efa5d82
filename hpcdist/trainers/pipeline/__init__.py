"""Trainer `pipeline`: a ResNet whose stages run on different ranks."""
