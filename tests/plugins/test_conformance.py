"""The plugins of this repository through the suite that every plugin has."""

from rapid_infer.testing.conformance import conformance_tests

test_llama = conformance_tests("rapid-infer-llama")
test_qwen3 = conformance_tests("rapid-infer-qwen3")
test_deepseek_v2 = conformance_tests("rapid-infer-deepseek-v2")
