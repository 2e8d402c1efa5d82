"""Like nanoGPT's train.py: global settings, overridden by a config file and by `--key=value`; only rank 0 prints."""

import os
import sys
from ast import literal_eval

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

out_dir = "out"
init_from = "scratch"
max_iters = 6
learning_rate = 0.01
gradient_accumulation_steps = 4
for arg in sys.argv[1:]:  # configurator.py
    if "=" not in arg:
        exec(open(arg).read())  # noqa: SIM115
    else:
        key, val = arg.removeprefix("--").split("=")
        globals()[key] = val if isinstance(globals()[key], str) else literal_eval(val)

ddp = int(os.environ.get("RANK", -1)) != -1
dist.init_process_group(backend="gloo")
master_process = int(os.environ["RANK"]) == 0
assert gradient_accumulation_steps % int(os.environ["WORLD_SIZE"]) == 0
gradient_accumulation_steps //= int(os.environ["WORLD_SIZE"])
torch.manual_seed(1337 + int(os.environ["RANK"]))

checkpoint = os.path.join(out_dir, "ckpt.pt")
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(net.parameters(), lr=learning_rate)
iter_num = 0
if init_from == "resume":
    saved = torch.load(checkpoint)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    iter_num = saved["iter_num"]
model = DistributedDataParallel(net)
while iter_num < max_iters:
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        loss = model(torch.randn(8, 4)).square().mean() / gradient_accumulation_steps
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if master_process:
        print(f"iter {iter_num}: loss {loss.item():.6f}")
if master_process:
    os.makedirs(out_dir, exist_ok=True)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}, checkpoint)
dist.destroy_process_group()
