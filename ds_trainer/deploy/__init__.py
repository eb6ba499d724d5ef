"""What becomes of a trained model: export, ONNX, compact files, latency, and the benchmark."""
