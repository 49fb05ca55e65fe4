from rapid_infer.testing.conformance import conformance_tests

test_conformance = conformance_tests("rapid-infer-gemma2")
