"""The version of the runtime; plugins state the versions they work with as a requirement on `rapid-infer`."""

__version__ = "0.1.0"
