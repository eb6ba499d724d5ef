"""What becomes of a trained model: export, ONNX, the card, and the measurement of folders."""
