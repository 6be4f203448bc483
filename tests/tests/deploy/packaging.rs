//! The packages: what is in them, and that they install, work and go in a clean system.

use crate::docker::{Container, PACKAGES, containers, done, packages, unpack};
use mpsshim_api::table;
use mpsshim_tests::artifacts::artifact;
use mpsshim_tests::control_daemon::Done;
use mpsshim_tests::symbols::{INTERPOSED, exported};
use object::{Object, ObjectSection};
use pulldown_cmark::{Event, Parser, Tag};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use tempfile::TempDir;

/// The oldest C library that the packages promise to work with.
const GLIBC: (u32, u32) = (2, 28);
const PROGRAMS: [&str; 4] = ["mps-control", "mps-server", "mps-run", "mps-device-plugin"];
/// What a container without a GPU is told besides.
const SOFTGPU: &str = "export MPSSHIM_CUDA_LIBRARY=/built/libsoftgpu.so";
const NBODY: &str = "/built/nbody -compare -numbodies=512";

/// The unpacked archive.
static UNPACKED: LazyLock<(TempDir, PathBuf)> = LazyLock::new(|| {
    let folder = TempDir::with_prefix("packaging-").expect("directory");
    let root = unpack(folder.path());
    (folder, root)
});

fn unpacked(name: &str) -> Vec<u8> {
    let path = UNPACKED.1.join(name);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn nothing_asks_for_a_newer_c_library() {
    if !packages() {
        return;
    }
    for name in PROGRAMS
        .map(|name| format!("bin/{name}"))
        .iter()
        .map(String::as_str)
        .chain(["lib/mpsshim/libmpsshim.so"])
    {
        let file = unpacked(name);
        let file = object::File::parse(&*file).expect("ELF");
        let names = file.section_by_name(".dynstr").expect("dynamic");
        let names = names.data().expect("names").split(|byte| *byte == 0);
        let names: Vec<&str> = names.filter_map(|name| str::from_utf8(name).ok()).collect();
        let versions = names.iter().filter_map(|name| {
            let mut numbers = name.strip_prefix("GLIBC_")?.split('.');
            let number = |text: Option<&str>| text.and_then(|text| text.parse().ok());
            Some((number(numbers.next())?, number(numbers.next())?))
        });
        let newest = versions.max().expect("versions");
        assert!(newest <= GLIBC, "{name} asks for {newest:?}");
        let libraries = names.iter().filter(|name| name.contains(".so"));
        for library in libraries {
            assert!(
                [
                    "libc.so.6",
                    "libm.so.6",
                    "libdl.so.2",
                    "libpthread.so.0",
                    "ld-linux-x86-64.so.2",
                    "libcuda.so.1"
                ]
                .contains(library),
                "{name} names {library}"
            );
        }
    }
}

#[test]
fn the_library_exports_the_table_under_the_driver_s_name() {
    if !packages() {
        return;
    }
    let file = unpacked("lib/mpsshim/libmpsshim.so");
    let expected = table::symbols().chain(INTERPOSED.iter().copied());
    assert_eq!(exported(&file), expected.map(str::to_owned).collect());
    let path = UNPACKED.1.join("lib/mpsshim/libmpsshim.so");
    let dynamic = done(Command::new("readelf").arg("-d").arg(path));
    assert!(dynamic.contains("soname: [libcuda.so.1]"), "{dynamic}");
    assert!(!dynamic.contains("PATH)"), "{dynamic}");
}

#[test]
fn the_driver_finds_the_server_s_locks() {
    let mut servers = vec![fs::read(artifact("mps-server")).expect("mps-server")];
    if packages() {
        // Another linker's.
        servers.push(unpacked("bin/mps-server"));
    }
    for file in servers {
        let mut locks = exported(&file);
        locks.retain(|name| name.starts_with("pthread_"));
        let expected = [
            "pthread_mutex_lock",
            "pthread_rwlock_rdlock",
            "pthread_rwlock_wrlock",
        ];
        assert_eq!(locks, expected.map(str::to_owned).into());
    }
}

/// The Markdown pages below a folder.
fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("documents") {
        let path = entry.expect("entry").path();
        if path.is_dir() {
            pages(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "md") {
            found.push(path);
        }
    }
}

#[test]
fn links_of_the_documents_lead_to_files() {
    if !packages() {
        return;
    }
    let documents = UNPACKED.1.join("share/doc/mpsshim");
    let mut found = Vec::new();
    pages(&documents, &mut found);
    assert!(found.len() > 50, "{}", found.len());
    for page in found {
        let text = fs::read_to_string(&page).expect("a page");
        for event in Parser::new(&text) {
            let (Event::Start(Tag::Link { dest_url, .. })
            | Event::Start(Tag::Image { dest_url, .. })) = event
            else {
                continue;
            };
            let (file, _) = dest_url.split_once('#').unwrap_or((&dest_url, ""));
            if file.is_empty() || file.contains(':') {
                continue;
            }
            let leads = page.parent().expect("a folder").join(file);
            assert!(leads.exists(), "{}: {file}", page.display());
        }
    }
    for file in [
        "packaging/grafana/mpsshim.json",
        "packaging/containers/compose.yaml",
        "packaging/kubernetes/kustomization.yaml",
    ] {
        assert!(documents.join(file).is_file(), "{file}");
    }
}

/// A project with the release script, a version and a changelog.
fn project(changelog: &str) -> TempDir {
    let folder = TempDir::with_prefix("release-").expect("directory");
    let at = |name: &str| folder.path().join(name);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    fs::create_dir(at("scripts")).expect("scripts");
    for script in ["scripts/release.sh", "scripts/tools.sh"] {
        fs::copy(root.join(script), at(script)).expect("a script");
    }
    let manifest = "[workspace.package]\nversion = \"1.2.3\"\n";
    fs::write(at("Cargo.toml"), manifest).expect("Cargo.toml");
    fs::write(at("CHANGELOG.md"), changelog).expect("CHANGELOG.md");
    for arguments in [
        &["init", "--quiet"][..],
        &["add", "--all"],
        &["commit", "--quiet", "--message", "First"],
    ] {
        git(&folder, arguments);
    }
    folder
}

fn git(folder: &TempDir, arguments: &[&str]) {
    let mut command = Command::new("git");
    command.current_dir(folder.path()).args([
        "-c",
        "user.name=Someone",
        "-c",
        "user.email=someone@example.com",
    ]);
    done(command.args(arguments));
}

fn release(folder: &TempDir, arguments: &[&str]) -> (i32, String) {
    let script = folder.path().join("scripts/release.sh");
    let output = Command::new(&script).args(arguments).output();
    let result = Done::from(output.expect("release.sh"));
    let said = result.err.replace(&format!("{}: ", script.display()), "");
    (result.code, said.trim_end().to_owned())
}

#[test]
fn a_release_that_does_not_fit_its_tag_is_refused() {
    const SECTION: &str = "# Changelog\n\n## [Unreleased]\n\n## [1.2.3] - 2026-01-01\n\n- New.\n";
    let folder = project(SECTION);
    let refused = |arguments: &[&str]| release(&folder, arguments);
    let no_tag = "this commit has no tag: git tag v1.2.3, or scripts/release.sh v1.2.3";
    assert_eq!(refused(&[]), (1, no_tag.to_owned()));
    let other = "the version in Cargo.toml is 1.2.3: the tag is v1.2.3, not v1.2.4";
    assert_eq!(refused(&["v1.2.4"]), (1, other.to_owned()));
    let unknown = "unknown option --image; --help shows the usage";
    assert_eq!(refused(&["--image"]), (2, unknown.to_owned()));
    let two = "one tag is expected, not v1 and v2; --help shows the usage";
    assert_eq!(refused(&["v1", "v2"]), (2, two.to_owned()));
    fs::write(folder.path().join("new"), "").expect("a file");
    assert_eq!(
        refused(&["v1.2.3"]),
        (1, "not committed:\n?? new".to_owned())
    );
    git(&folder, &["tag", "v1.2.3"]);
    git(&folder, &["add", "--all"]);
    git(&folder, &["commit", "--quiet", "--message", "Second"]);
    let elsewhere = "tag v1.2.3 is another commit's: git checkout v1.2.3";
    assert_eq!(refused(&["v1.2.3"]), (1, elsewhere.to_owned()));
}

#[test]
fn a_release_without_a_section_in_the_changelog_is_refused() {
    let said = "CHANGELOG.md has no section ## [1.2.3], or an empty one";
    for changelog in [
        "# Changelog\n\n## [Unreleased]\n\n- New.\n",
        "# Changelog\n\n## [1.2.3]\n\n## [1.2.2]\n\n- Old.\n",
        "# Changelog\n\n## [1.2.30]\n\n- Newer.\n",
    ] {
        let folder = project(changelog);
        assert_eq!(release(&folder, &["v1.2.3"]), (1, said.to_owned()));
    }
}

#[test]
fn lintian_finds_nothing() {
    if !packages() {
        return;
    }
    let asked = Command::new("lintian")
        .args(["--allow-root", "--fail-on", "error,warning"])
        .arg(&PACKAGES.debian)
        .output();
    let Ok(output) = asked else {
        return eprintln!("lintian is not installed: the Debian package is not looked at");
    };
    let result = Done::from(output);
    assert_eq!((result.code, result.out.as_str()), (0, ""));
}

/// Installs the Debian package, which says nothing of its own.
#[track_caller]
fn install(container: &Container) {
    let said = container.does(
        "dpkg --install /packages/mpsshim_*.deb >/dev/null 2>/tmp/said || { cat /tmp/said >&2; exit 1; }
         grep -v '^Created symlink' /tmp/said || true",
    );
    assert_eq!(said, "");
}

fn container() -> Option<Container> {
    containers().then(|| Container::start(&[]))
}

/// Has a client preloaded with that library come to the daemon that runs, and looks that it was served.
#[track_caller]
fn is_used(container: &Container, library: &str) {
    let before = clients(container);
    let preloaded = container.does(&format!("{SOFTGPU}; LD_PRELOAD={library} {NBODY}"));
    assert!(preloaded.contains("  OK ("), "{preloaded}");
    let run = container.does(&format!("{SOFTGPU}; mps-run {NBODY}"));
    assert!(run.contains("  OK ("), "{run}");
    assert_eq!(clients(container), before + 2);
    let server = container.does("mps-control get_server_list");
    let server = server.trim().parse::<u32>().expect("one server");
    let status = container.does(&format!("mps-control get_server_status {server}"));
    assert_eq!(status, "ACTIVE\n");
    let devices = container.does("mps-control device_query");
    assert!(devices.contains("Software GPU"), "{devices}");
}

fn clients(container: &Container) -> usize {
    let log = container.does("cat /var/log/mpsshim/control.log");
    log.matches("NEW CLIENT").count()
}

#[test]
fn the_archive_works_wherever_it_is_unpacked() {
    let Some(container) = container() else { return };
    container.does("mkdir '/opt/elsewhere'; tar -xzf /packages/*.tar.gz -C /opt/elsewhere");
    let path = container.does("echo /opt/elsewhere/mpsshim-*");
    let path = path.trim();
    container.does(&format!("ln -s {path}/bin/* /usr/local/bin"));
    // By its links, from another directory, and without anything else of it in the system.
    container.does(&format!("{SOFTGPU}; cd /; mps-control -d"));
    is_used(&container, &format!("{path}/lib/mpsshim/libmpsshim.so"));
    assert_eq!(container.does("mps-control quit"), "");
    assert_eq!(container.shell("mps-control get_server_list").code, 1);
}

#[test]
fn systemd_runs_the_daemon() {
    if !containers() {
        return;
    }
    let Some(container) = Container::boot() else {
        return;
    };
    let state = |unit: &str| container.shell(&format!("systemctl {unit} mpsshim")).out;
    install(&container);
    assert_eq!(state("is-enabled"), "enabled\n");
    assert_eq!(state("is-active"), "active\n", "{}", state("status"));
    container.does(
        "echo 'cuda_library = \"/built/libsoftgpu.so\"' >> /etc/mpsshim/config.toml
         systemctl restart mpsshim",
    );
    is_used(&container, "/usr/lib/mpsshim/libmpsshim.so");

    // Log rotation.
    container.does(
        "mv /var/log/mpsshim/control.log /var/log/mpsshim/control.log.1; systemctl reload mpsshim
         until test -e /var/log/mpsshim/control.log; do sleep 0.1; done",
    );

    // A daemon that dies is replaced; the program does not notice.
    let program = "nbody -benchmark -numbodies=256 -i=1000000";
    container.does(&format!(
        "mps-run /built/{program} >/dev/null 2>&1 &
         echo $! > /tmp/nbody.pid; until mps-control ps | grep -q nbody; do sleep 0.1; done"
    ));
    let before = container.does("systemctl show --property MainPID --value mpsshim");
    container.does(&format!("kill -KILL {before}"));
    container.does(&format!(
        "until systemctl --quiet is-active mpsshim && mps-control ps 2>/dev/null | grep -q nbody; do sleep 0.1; done
         test $(systemctl show --property MainPID --value mpsshim) != {before}"
    ));
    container.does("kill $(cat /tmp/nbody.pid)");

    container.does("systemctl stop mpsshim");
    assert_eq!(state("is-active"), "inactive\n");
    let ours = "cat /proc/[0-9]*/comm 2>/dev/null | grep mps- || true";
    assert_eq!(container.does(ours), "");
    container.does("systemctl start mpsshim; dpkg --remove mpsshim >/dev/null 2>&1");
    assert_eq!(container.does(ours), "");
}

#[test]
fn the_debian_package_installs_upgrades_and_goes() {
    let Some(container) = container() else { return };
    install(&container);
    let version = env!("CARGO_PKG_VERSION");
    for program in PROGRAMS {
        let told = container.does(&format!("{program} --version"));
        assert_eq!(told, format!("{program} {version}\n"));
        let page = container.does(&format!("zcat /usr/share/man/man1/{program}.1.gz"));
        assert!(page.contains(&format!(".TH {program} 1")), "{page}");
        container.does(&format!(
            "grep -q {program} /usr/share/bash-completion/completions/{program} \
             /usr/share/zsh/vendor-completions/_{program} /usr/share/fish/vendor_completions.d/{program}.fish"
        ));
    }
    // The administrator's settings count, and stay.
    let setting = "active_thread_percentage = 50";
    container.does(&format!(
        "echo '{setting}' >> /etc/mpsshim/config.toml; {SOFTGPU}; mps-control -d"
    ));
    let library = "/usr/lib/mpsshim/libmpsshim.so";
    is_used(&container, library);
    let percentage = container.does("mps-control get_default_active_thread_percentage");
    assert_eq!(percentage, "50.0\n");

    // An upgrade leaves the daemon to the program that runs, and says so.
    container.does(&format!(
        "dpkg-deb --raw-extract /packages/mpsshim_*.deb /tmp/next
         sed -i 's/^Version: .*/Version: {version}+next/' /tmp/next/DEBIAN/control
         dpkg-deb --build /tmp/next /tmp/next.deb >/dev/null"
    ));
    container.does(&format!(
        "{SOFTGPU}; LD_PRELOAD={library} /built/nbody -benchmark -numbodies=1024 -i=1000000 >/dev/null 2>&1 &
         until [ -n \"$(mps-control ps)\" ]; do sleep 0.1; done"
    ));
    let upgraded = container.shell("dpkg --install /tmp/next.deb >/dev/null");
    assert_eq!(upgraded.code, 0, "{}", upgraded.err);
    assert!(
        upgraded
            .err
            .contains(&format!("keep the daemon and server of version {version}")),
        "{}",
        upgraded.err
    );
    assert_eq!(container.does("mps-control ps | wc -l").trim(), "2");
    // Programs that start now are served. There is a new server for them, whether or not the program that runs, which
    // hardly ever waits for its kernels, can move to it.
    is_used(&container, library);
    let old = container.does("mps-control get_server_list");
    let moved = container.does(&format!("mps-control restart_server {old}"));
    let new = moved.lines().next().expect("a server");
    assert!(new.parse::<u32>().is_ok() && new != old.trim(), "{moved}");
    assert_eq!(container.does("mps-control ps | wc -l").trim(), "2");
    // The server of the version before is kept for programs with its library, and so are the two before that one.
    let kept = |what: &str| {
        let list = container.does("ls /usr/lib/mpsshim/earlier");
        assert_eq!(list.split_whitespace().collect::<Vec<_>>().join(" "), what);
    };
    kept(version);
    container.does(&format!(
        "/usr/lib/mpsshim/earlier/{version}/mps-server --version | grep -q {version}"
    ));
    for next in ["b", "c", "d"] {
        container.does(&format!(
            "sed -i 's/^Version: .*/Version: {version}+{next}/' /tmp/next/DEBIAN/control
             dpkg-deb --build /tmp/next /tmp/next.deb >/dev/null
             touch -d '1 hour ago' /usr/lib/mpsshim/earlier/*
             dpkg --force-downgrade --install /tmp/next.deb >/dev/null 2>&1"
        ));
    }
    let latest = ["+b", "+c", "+next"].map(|of| format!("{version}{of}"));
    kept(&latest.join(" "));
    container.does("mps-control quit -t 0");
    container.does(&format!(
        "grep -q '^{setting}' /etc/mpsshim/config.toml; {SOFTGPU}; mps-control -d"
    ));
    is_used(&container, library);

    // Removal ends the daemon; settings stay until the purge.
    container.does("dpkg --remove mpsshim >/dev/null 2>&1; test -e /etc/mpsshim/config.toml");
    assert_eq!(
        container
            .shell("ps -e 2>/dev/null || cat /proc/[0-9]*/comm")
            .out
            .matches("mps-")
            .count(),
        0
    );
    let left =
        "find / -xdev -not -path '/proc/*' -name '*mps*' -path '*mpsshim*' -not -path '/tmp/*'";
    assert!(!container.does(left).contains("/usr/"));
    container.does("dpkg --purge mpsshim >/dev/null 2>&1");
    assert_eq!(container.does(left), "");
}
