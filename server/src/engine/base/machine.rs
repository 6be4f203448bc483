//! Memory of the machine, or of the memory cgroup of this process if that has less. Cgroups of version 1 and 2.

use std::fs;
use std::path::{Path, PathBuf};

/// A memory cgroup's files. Their names differ between the versions.
struct Names {
    /// Where the hierarchy is mounted.
    mount: &'static str,
    limit: &'static str,
    used: &'static str,
    /// Key in `memory.stat` of the file pages that the kernel reclaims first.
    reclaimable: &'static str,
}

const VERSION_1: Names = Names {
    mount: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file ",
};
const VERSION_2: Names = Names {
    mount: "sys/fs/cgroup",
    limit: "memory.max",
    used: "memory.current",
    reclaimable: "inactive_file ",
};

/// Bytes of memory that this process can have at most, and those that are available now; `None` if unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Bytes installed, or the lowest limit of the cgroups.
    pub total: Option<u64>,
    /// Bytes available.
    pub available: Option<u64>,
}

impl Memory {
    /// That of this process.
    pub fn read() -> Memory {
        Memory::under(Path::new("/"))
    }

    /// As the files under this root say.
    fn under(root: &Path) -> Memory {
        let installed = fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
        let kib = |name| Some(field(&installed, name)? << 10);
        let (mut total, mut available) = (kib("MemTotal:"), kib("MemAvailable:"));
        for (folder, names) in cgroups(root) {
            let number = |name| -> Option<u64> {
                let text = fs::read_to_string(folder.join(name)).ok()?;
                text.trim().parse().ok()
            };
            let Some(limit) = number(names.limit) else {
                continue;
            };
            total = total.into_iter().chain([limit]).min();
            let used = number(names.used).unwrap_or(0);
            let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
            let reclaimable = field(&stat, names.reclaimable).unwrap_or(0);
            let left = limit.saturating_sub(used).saturating_add(reclaimable);
            available = available.into_iter().chain([left]).min();
        }
        Memory { total, available }
    }
}

/// The number behind this name at the beginning of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}

/// Folders of the process's memory cgroup and those above it. In a container the path may be one of the host, where
/// only the root of the hierarchy exists.
fn cgroups(root: &Path) -> Vec<(PathBuf, &'static Names)> {
    let own = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut found = Vec::new();
    for line in own.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        let names = match controllers {
            "" => &VERSION_2,
            _ if controllers.split(',').any(|name| name == "memory") => &VERSION_1,
            _ => continue,
        };
        let folders = Path::new(path.trim_start_matches('/')).ancestors();
        found.extend(folders.map(|folder| (root.join(names.mount).join(folder), names)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// A machine with 8 GiB, 6 GiB of them available, with these files.
    fn memory(files: &[(&str, &str)]) -> Memory {
        let root = tempfile::tempdir().expect("a folder");
        let meminfo = "MemTotal:        8388608 kB\nMemFree: 1 kB\nMemAvailable:    6291456 kB\n";
        for (path, text) in files.iter().chain(&[("proc/meminfo", meminfo)]) {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        }
        Memory::under(root.path())
    }

    fn gib(total: u64, available: u64) -> Memory {
        Memory {
            total: Some(total * GIB),
            available: Some(available * GIB),
        }
    }

    #[test]
    fn without_a_limit_it_is_the_machines() {
        assert_eq!(memory(&[]), gib(8, 6));
        let unlimited = [
            ("proc/self/cgroup", "4:memory:/a\n0::/a\n"),
            ("sys/fs/cgroup/a/memory.max", "max\n"),
            (
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
        ];
        assert_eq!(memory(&unlimited), gib(8, 6));
        let nothing = Memory::under(Path::new("/nonexistent"));
        assert_eq!((nothing.total, nothing.available), (None, None));
    }

    #[test]
    fn the_lowest_limit_above_counts() {
        let nested = [
            ("proc/self/cgroup", "0::/pod/server\n"),
            ("sys/fs/cgroup/pod/server/memory.max", "5368709120"),
            ("sys/fs/cgroup/pod/server/memory.current", "1073741824"),
            ("sys/fs/cgroup/pod/memory.max", "4294967296"),
            ("sys/fs/cgroup/pod/memory.current", "3221225472"),
            (
                "sys/fs/cgroup/pod/memory.stat",
                "anon 7\ninactive_file 1073741824\nactive_file 5\n",
            ),
        ];
        assert_eq!(memory(&nested), gib(4, 2));
    }

    #[test]
    fn in_a_container_of_version_1_the_root_counts() {
        let contained = [
            (
                "proc/self/cgroup",
                "9:name=systemd:/d\n4:cpu,memory:/docker/d\n0::/\n",
            ),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "2147483648"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "2147483648"),
            (
                "sys/fs/cgroup/memory/memory.stat",
                "inactive_file 5\ntotal_inactive_file 1073741824\n",
            ),
        ];
        assert_eq!(memory(&contained), gib(2, 1));
    }
}
