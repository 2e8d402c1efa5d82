"""A fake srun: starts a command once per task, all on this machine, and connects the tasks as the real one does.

    python fake_srun.py --ntasks=4 --nodes=2 --error=FOLDER/rank-%5t.log [other options] COMMAND…

Each task gets all of the standard input, and writes to the standard output of this process. The nodes are n1, n2, ….
The file that FAKE_SRUN_TASKS names gets the process ids of the tasks, for a fake scancel.
"""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress


class Task:
    def __init__(self, number: int, options: dict[str, str], command: list[str]) -> None:
        self.number = number
        num_nodes, num_tasks = int(options.get("nodes", "1")), int(options["ntasks"])
        per_node = num_tasks // num_nodes
        self.node = f"n{1 + number // per_node}"
        env = {
            **os.environ,
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": f"n[1-{num_nodes}]" if num_nodes > 1 else "n1",
            "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{num_nodes})",
            "SLURM_STEP_NUM_TASKS": str(num_tasks),
            "SLURM_PROCID": str(number),
            "SLURM_LOCALID": str(number % per_node),
            "SLURM_NODEID": str(number // per_node),
            "SLURMD_NODENAME": self.node,
        }
        with open(options["error"].replace("%5t", f"{number:05d}"), "ab") as log:
            self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stderr=log, start_new_session=True)
        self.descriptor = os.pidfd_open(self.process.pid)

    def pass_on(self, text: bytes) -> None:
        """Write to the task's standard input; "" ends it."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            if text:
                self.process.stdin.write(text)
                self.process.stdin.flush()
            else:
                self.process.stdin.close()

    def say_end(self) -> int:
        """Print srun's message about a task that has failed; returns the task's exit code, as a shell has it."""
        code = self.process.wait()
        if code == 0:
            return 0
        how = f"Exited with exit code {code}" if code > 0 else signal.strsignal(-code)
        print(f"srun: error: {self.node}: task {self.number}: {how}", file=sys.stderr, flush=True)
        return code if code > 0 else 128 - code


def main(words: list[str]) -> int:
    num_options = next(index for index, word in enumerate(words) if not word.startswith("--"))
    options = {name: value for name, _, value in (word[2:].partition("=") for word in words[:num_options])}
    running = [Task(number, options, words[num_options:]) for number in range(int(options["ntasks"]))]
    if "FAKE_SRUN_TASKS" in os.environ:
        with open(os.environ["FAKE_SRUN_TASKS"], "a") as file:
            file.writelines(f"{task.process.pid}\n" for task in running)
    codes = []
    has_input = True
    while running:
        poll = select.poll()
        if has_input:
            poll.register(0, select.POLLIN)
        for task in running:
            poll.register(task.descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll()}
        if 0 in ready:
            text = os.read(0, 1 << 16)
            has_input = bool(text)
            for task in running:
                task.pass_on(text)
        for task in [task for task in running if task.descriptor in ready]:
            codes.append(task.say_end())
            running.remove(task)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
