# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Preflight
#
# Checks one training parameter file against this machine before it costs quota: the model's exact size, memory, disk, data, and the GDN-2 kernel against its reference. Then compiles the real training step and shows its memory.
#
# | | |
# |---|---|
# | needs | any machine; run it where you will train |
# | wall time | about a minute on 2 cores |
# | quota | seconds of TPU time |
# | inputs | a training parameter file and its corpus |
# | outputs | `outputs/preflight-<run>/`: checks, memory, evidence |

# %% [markdown]
# Finds the repository (here, above, just below, or attached to a Kaggle session), checks the packages before JAX is imported, and starts the budget's clock.

# %%
import sys
from pathlib import Path

here, attached = Path.cwd(), Path("/kaggle/input")
_places = [here, *here.parents, *here.glob("*")]
_places += [*attached.glob("*"), *attached.glob("datasets/*/*")]
root = next((place for place in _places if (place / "atomic_lib" / "__init__.py").is_file()), None)
if root is None:
    raise FileNotFoundError(f"no atomic_lib at, above or just below {here}: clone or attach it")
sys.path[:0] = [str(root)]
from atomic_lib.notebook import Session

session = Session.begin(root)

# %% [markdown]
# ## Parameters
# `run` chooses the parameter file `params/preflight/<run>.yaml`. `None` means "as in that file"; any other value replaces it. Any field of `atomic_lib.config.PreflightConfig` may be added here; an unknown name or an impossible value is refused in the next cell.

# %% tags=["parameters"]
run: str = "smoke"  # "smoke" or "seed1"
train: str = None  # the parameter file to check, as "<notebook>/<run>", e.g. "train_hybrid/seed1"
topology: str = None  # TPU slice to compile for ahead of time, e.g. "v5e-8"; takes minutes, no TPU

# %%
loaded = session.read_parameters("preflight", globals())
config = loaded.config

# %% [markdown]
# ## Run folder
# `manifest.json` records every parameter with its origin, the code, the packages and the devices. The result of an earlier run with this name is removed first.

# %%
from atomic_lib.notebook import show_manifest

run_folder = session.start_run(loaded)
show_manifest(run_folder)

# %% [markdown]
# ## What would be trained

# %%
from atomic_lib.notebook import show_model

training = session.training_config(config.train)
show_model(training.model_config)

# %%
from atomic_lib.data import open_run_dataset
from atomic_lib.notebook import show_dataset

dataset = open_run_dataset(run_folder, training, root=session.root)
show_dataset(dataset, sequence_length=training.sequence_length)

# %% [markdown]
# ## Checks
# A failed check stops here and says what to change.

# %%
from atomic_lib.notebook import show_table
from atomic_lib.preflight import check_runtime

checks = check_runtime(run_folder, training, dataset)
show_table(checks, caption="This machine")

# %% [markdown]
# ## The compiled training step
# The step with its optimiser, compiled for the devices of this machine.

# %%
from atomic_lib.preflight import compile_training_step

compiled = compile_training_step(run_folder, training)
show_table(compiled, caption="Training step")

# %% [markdown]
# ## Ahead of time
# The same step and the evaluation, compiled for the TPU slice `topology` whether or not one is here: memory a chip, predicted time by part, tokens in the session, disk. Every time is an estimate; its basis stands beside it. A run that does not fit stops here and says what to change.

# %%
from atomic_lib.preflight import compile_ahead_of_time

predicted = compile_ahead_of_time(run_folder, training, topology=config.topology)
show_table(predicted, caption="Ahead of time")

# %% [markdown]
# ## Evidence
# `SUCCESS.json` is written last, with the hash of every file. Unzip the download anywhere and run `python verify.py` in it: it needs nothing but Python.

# %%
from atomic_lib.notebook import offer_zip

run_folder.succeed(stop_reason="completed", checks=len(checks))
offer_zip(run_folder)
