//! Gives the library the driver's SONAME, so that a program linked with `-lcuda` accepts it.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo:rerun-if-changed=build.rs");
}
