//! Says what of a program's device code binds the program to its server (docs/faults.md): code that stores addresses of
//! functions or allocates memory, and variables that cannot be saved.
//!
//! Reads cubins, fatbins, PTX texts, and programs and libraries that `nvcc` has linked.

use anyhow::Context;
use clap::Parser;
use mpsshim_server::engine::{ImageBonds, image_bonds, images_of};
use std::path::PathBuf;

#[derive(Parser)]
#[command(about = "Says what of a program's device code binds the program to its server")]
struct Options {
    /// Compute capability of the device: 10 × major + minor
    #[arg(long, default_value_t = 90)]
    arch: u32,
    /// Cubins, fatbins, PTX texts, programs or libraries
    #[arg(required = true)]
    files: Vec<PathBuf>,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    for file in &options.files {
        let name = file.display();
        let bytes = std::fs::read(file).with_context(|| format!("{name} cannot be read"))?;
        let images = images_of(&bytes);
        let found: Vec<ImageBonds> = images
            .iter()
            .filter_map(|image| image_bonds(image, options.arch))
            .collect();
        let stores = found.iter().filter(|one| one.stores_addresses).count();
        let unknown = found.iter().filter(|one| one.variables.is_none()).count();
        let bytes = found.iter().filter_map(|one| one.variables).max();
        println!(
            "{name}: {} images, {stores} store addresses, {unknown} with variables that are not known, at most {} bytes of variables",
            found.len(),
            bytes.unwrap_or_default()
        );
    }
    Ok(())
}
