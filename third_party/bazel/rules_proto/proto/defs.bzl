"""The rules of rules_proto that Bazel's own tools load: the native ones."""

proto_lang_toolchain = native.proto_lang_toolchain
proto_library = native.proto_library
