"""Parts of a training beside nnU-Net's own, each in its file.

What a part does at a moment stands there; when the moments are stands in
:mod:`nnunet_cpr.nnunet.moments`, and only there.
"""
