"""Code that Triton generates for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_COMPILE = """
import re, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nnunet_cpr.fused import _triton_kernels

def compiled(kernel, constants, **types):
    names = kernel.arg_names
    constants = {**constants, **{n: None for n, t in types.items() if t == "constexpr"}}
    signature = {n: types.get(n, "constexpr") for n in names}
    places = {(names.index(n),): value for n, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs={})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

tables = dict(addresses="*i64", numels="*i64", matrices="*i32", first_chunks="*i32",
              chunk_tensors="*i32", first_partials="*i32")
sums = dict(partials="*fp32", strides="*i32", samples="*i64")
kinds = [(True, tl.float32, False), (False, tl.float32, True), (True, tl.bfloat16, True)]
for adam, param, amp in kinds:
    scalars = ("momentum", "beta1_rest", "log_beta1", "beta2", "beta2_rest", "log_beta2", "eps")
    ptx = compiled(
        _triton_kernels.step_kernel,
        dict(PARAM=param, MOMENT=param, ALIGNED=True, LR_IS_TENSOR=amp, ADAM=adam, MOMENTUM=True,
             NESTEROV=not adam, MAXIMIZE=False, AMSGRAD=amp and adam, SCALED=amp, MAY_SKIP=amp,
             CHUNK=16384, BLOCK=1024, SAMPLES=1024),
        **tables, **sums, coefficients="*fp32", lr="*fp32" if amp else "fp32",
        grad_scale="*fp32" if amp else "constexpr", found_inf="*fp32" if amp else "constexpr",
        **{name: "fp32" for name in scalars},
    )
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx, "loads are not as wide as they can be"
    assert not re.search(r"atom|red\\.global|\\.local", ptx), "an atomic, or local memory"
    wide = len(re.findall(r"ld\\.global\\.v4", ptx))
    print(adam, param, amp, wide)
for param in (tl.float32, tl.float16):
    constants = dict(PARAM=param, ALIGNED=True, CHUNK=16384, SAMPLES=1024)
    compiled(_triton_kernels.changed_kernel, constants, **tables, **sums, changed="*i32")
    constants["BLOCK"] = 1024
    ptx = compiled(_triton_kernels.partials_kernel, constants, **tables, **sums, changed="*i32")
    assert "ld.global.v4" in ptx
types = dict(partials="*fp32", first_partials="*i32", sums="*fp64")
compiled(_triton_kernels.sum_kernel, dict(BLOCK=1024), **types)
print("compiled")
"""


def test_kernels_have_wide_loads_and_no_atomics() -> None:
    pytest.importorskip("triton", minversion="3.3")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "compiled"
