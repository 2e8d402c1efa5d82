"""The shipped trainers: one file each, `train(ctx, cfg)`, read from top to bottom. None imports another."""
