import sys,re; sys.path.insert(0,'.tmp')
from e import F
f=F('hpcdist/rank/context.py')
f.sub('''        """Return whether a checkpoint is due after `step` steps.

        A checkpoint is due every `checkpoint.every_steps` steps and when the ranks have agreed to stop, unless this
        step is saved already.
        """''','''        """Return whether a checkpoint is due: every `checkpoint.every_steps` steps, and when the ranks agree to stop."""''')
f.sub('''        """Return the path at which to write an artifact of the MLflow run; its parent folder exists.

        Write the file on one rank. It is uploaded while the run continues, and again after each change.

        Args:
            name: path relative to the artifacts, such as `returns.png` or `samples/step-100.txt`.
        """''','''        """Return the path at which to write an artifact of the MLflow run, such as `samples/step-100.txt`.

        Write the file on one rank. It is uploaded while the run continues, and again after each change.
        """''')
f.save()
f=F('docs/reference/context.md')
f.sub('::: hpcdist.rank.context.Context\n','::: hpcdist.rank.context.Context\n    options:\n      inherited_members: true\n'); f.save()
f=F('docs/concepts/checkpoints.md')
f.sub('`load_weights` in `hpcdist/checkpoint/saver.py`','`load_weights` in `hpcdist/checkpoint/weights.py`')
f.sub('random states of all ranks (`hpcdist/checkpoint/state_dict.py`)','random states of all ranks (`hpcdist/checkpoint/rng_state.py`)'); f.save()
# tests
f=F('tests/unit/checkpoint/test_saver.py')
f.sub('pointers.append(kwargs["model"]["w"].data_ptr())','pointers.append(args[1].model["w"].data_ptr())')
f.sub('import clean_state_dict, load_clean_state_dict','import clean_state_dict')
f.sub('load_clean_state_dict(again, loaded.model)','again.load_state_dict(loaded.model)'); f.save()
