"""Golden tests: what users and published results depend on, frozen before a redesign.

They use public interfaces only: names exported by ``nnunet_cpr``, commands, the files that these write,
and nnU-Net's own search for trainers. ``record.py`` wrote the files in ``data/``.
"""
