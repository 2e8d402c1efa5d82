"""A script whose loss is NaN from step 5 on."""

import hpcdist

for step in range(1, 11):
    hpcdist.log({"train/loss": float("nan") if step >= 5 else 1 / step}, step)
    hpcdist.should_stop(step, 10)
