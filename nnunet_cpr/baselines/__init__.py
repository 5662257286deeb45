"""Comparison methods of the CPR paper and since then, each attachable to any torch optimizer.

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    optimizer = AdaDecay(model, weight_decay=1e-2, alpha=4.0).attach(optimizer)

To add one: write a subclass of :class:`Baseline` in ``decays.py`` or ``norms.py``, name it in the stub
beside this file, and list it in ``registry.py``. The nnU-Net trainers and the vision runs then find it
by its keyword. List it in ``benchmarks/competitors.py`` to measure its cost.

The names in the stub are imported when they are first used: names of trainers contain comparison
methods, and are read without importing torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
