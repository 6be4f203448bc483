//! The command line of mps-device-plugin.

use clap::Parser;
use mpsshim_control::cdi;
use mpsshim_control::cli::Documents;
use mpsshim_control::settings;
use mpsshim_control::top::seconds;
use std::path::PathBuf;
use std::time::Duration;

/// Where kubelet has its and the plugins' sockets, unless it was told otherwise (`--root-dir`).
const DEFAULT_FOLDER: &str = "/var/lib/kubelet/device-plugins";
/// More would make the list of a node with many GPUs longer than kubelet takes.
const MOST_PARTS: i64 = 1000;

/// Advertises parts of a node's GPUs to Kubernetes, and makes containers that request them clients of the control daemon.
///
/// Runs beside the control daemon on each node. A container that requests parts of a GPU gets the library, the daemon's
/// sockets, and the corresponding part of multiprocessors and memory as its limits. Parts of several GPUs are refused.
#[derive(Debug, Parser)]
#[command(name = "mps-device-plugin", version, after_help = settings::help_text())]
pub struct Plugin {
    /// Configuration file (sets MPSSHIM_CONFIG)
    #[arg(long, value_name = "PATH")]
    pub config: Option<PathBuf>,
    /// Number of parts of each GPU, 1 to 1000
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=MOST_PARTS))]
    pub parts: u32,
    /// Name of the resource that pods request
    #[arg(long, value_name = "NAME", default_value = cdi::KIND, value_parser = resource)]
    pub resource: String,
    /// Do not limit a container to its part of the multiprocessors
    #[arg(long)]
    pub no_thread_percentage: bool,
    /// Do not limit a container to its part of the memory
    #[arg(long)]
    pub no_memory_limit: bool,
    /// Have the container engine provide library and sockets, by the specification that `mps-control cdi generate` has
    /// written on the node
    #[arg(long)]
    pub cdi: bool,
    /// Preload the library through the container's /etc/ld.so.preload rather than LD_PRELOAD; the plugin writes that file to
    /// PATH, in a folder that has the same path on the node
    #[arg(long, value_name = "PATH", conflicts_with = "cdi")]
    pub ld_so_preload: Option<PathBuf>,
    /// Folder with the sockets of kubelet and its plugins
    #[arg(long, value_name = "DIR", default_value = DEFAULT_FOLDER)]
    pub kubelet_dir: PathBuf,
    /// Interval at which the control daemon is polled, 0.1 to 3600 seconds
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    pub interval: Duration,
    #[command(flatten)]
    #[allow(missing_docs, reason = "documented at its type")]
    pub documents: Documents,
}

/// Checks the form of an extended resource's name. Kubelet checks further rules and reports violations.
fn resource(name: &str) -> Result<String, String> {
    let usual = |part: &str| {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        !part.is_empty() && part.bytes().all(allowed)
    };
    match name.split_once('/') {
        Some((domain, rest)) if usual(domain) && usual(rest) => Ok(name.to_owned()),
        _ => Err("expected a domain, a slash and a name, such as mpsshim.io/gpu".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use mpsshim_control::cli::documents;

    #[test]
    fn every_option_is_in_the_manual() {
        let program = Plugin::command();
        let mut page = Vec::new();
        documents::manual(&program, &mut page).expect("memory");
        let page = String::from_utf8(page).expect("UTF-8").replace("\\-", "-");
        for option in program.get_arguments().filter_map(|arg| arg.get_long()) {
            assert!(page.contains(&format!("--{option}")), "{option}");
        }
        assert!(page.contains("kubelet refuses"), "{page}");
    }

    #[test]
    fn names_of_resources() {
        for name in ["mpsshim.io/gpu", "a/b", "example.com/gpu_half.1"] {
            assert_eq!(resource(name).as_deref(), Ok(name));
        }
        for name in ["", "gpu", "/gpu", "a/", "a/b/c", "a/../b", "a b/c"] {
            assert!(resource(name).is_err(), "{name}");
        }
    }
}
