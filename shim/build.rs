//! Sets the SONAME by which programs find the shim, and writes the list of exported symbols for
//! `src/loader/symbols.rs` and `src/loader/exports.rs` from the entry-point table.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::{env, fs};

use mpsshim_api::table;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");

    let mut list = String::from("entry_points! {\n");
    for (index, symbol) in table::symbols().enumerate() {
        writeln!(list, "    {index} {symbol}").expect("a String takes every write");
    }
    list.push_str("}\n");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    fs::write(out.join("entry_points.rs"), list).expect("the build folder is writable");
}
