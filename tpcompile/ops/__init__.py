"""Rules of the ATen ops, by family. Importing this package registers them all."""
