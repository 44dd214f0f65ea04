# SPDX-License-Identifier: Apache-2.0
"""What a notebook shows after each call: one function a panel."""

from IPython.display import Markdown, display
from matplotlib.figure import Figure

from atomic_lib.data import TokenDataset, gpt2_tokenizer
from atomic_lib.evidence import RunFolder
from atomic_lib.model import ModelConfig
from atomic_lib.notebook.display import as_image, show_table

SAMPLE_TOKENS = 60


def show_manifest(run: RunFolder) -> None:
    """The facts of manifest.json that a reader asks for first."""
    manifest = run.read_json("manifest.json")
    devices, git = manifest["devices"], manifest["git"]
    commit = "no git checkout" if git["commit"] is None else git["commit"][:12]
    facts = {
        "run": manifest["run_id"],
        "commit": commit + (" (with uncommitted changes)" if git["dirty"] else ""),
        "source tree": manifest["source"]["sha256"][:12],
        "python": manifest["python"],
        "jax / jaxlib": f"{devices['jax']} / {devices['jaxlib']}",
        "devices": f"{len(devices['devices'])} x {devices['devices'][0]['kind']}",
        "platform": devices["platform_version"].splitlines()[0],
    }
    show_table([{"fact": k, "value": v} for k, v in facts.items()], caption="Manifest")


def show_dataset(dataset: TokenDataset, *, sequence_length: int) -> None:
    """Sizes of both splits and the beginning of the first training document."""
    rows = [
        {
            "split": split.name,
            "tokens": len(split),
            "documents": sum(f.get("documents") or 0 for f in dataset.manifest[split.name]) or None,
            f"windows of {sequence_length}": split.window_count(sequence_length),
            "largest id": max(f["largest_id"] for f in dataset.manifest[split.name]),
        }
        for split in (dataset.train, dataset.validation)
    ]
    tokenizer = dataset.manifest["tokenizer"]["name"]
    show_table(rows, caption=f"{dataset.manifest['name']}, tokenizer {tokenizer}")
    if tokenizer == "gpt2":
        batch = dataset.train_batch(0, 0, batch_size=1, sequence_length=SAMPLE_TOKENS)
        text = gpt2_tokenizer().decode(batch[0].tolist())
        display(Markdown("A window of it:\n\n```text\n" + text.replace("```", "'''") + "\n```"))


def show_figure(run: RunFolder, name: str, figure: Figure) -> None:
    """Saves a figure as figures/<name>.png of the run folder and shows it."""
    run.save_figure(name, figure)
    display(as_image(figure))


def show_model(config: ModelConfig) -> None:
    """Parameters by optimiser group, and what the blocks are made of."""
    rows = [
        {"group": group, "parameters": count, "share": f"{count / config.parameter_count:.1%}"}
        for group, count in config.parameter_counts.items()
    ]
    rows.append({"group": "total", "parameters": config.parameter_count, "share": "100.0%"})
    blocks = f"{config.num_blocks} blocks of {' + '.join(config.block)} + ffn"
    show_table(rows, caption=f"Model: {blocks}; depth routing {config.routing}")
