//! How programs reach the driver through the preloaded shim, on a driver of a few C functions
//! (`fixtures/loader/genuine.c`).

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use mpsshim_api::table;
use mpsshim_tests::artifacts::artifact;
use mpsshim_tests::symbols::{INTERPOSED, exported};
use tempfile::TempDir;

/// The compiled fixtures.
struct Fixtures {
    folder: TempDir,
    shim: PathBuf,
}

static FIXTURES: LazyLock<Fixtures> = LazyLock::new(|| {
    let folder = TempDir::new().unwrap();
    let at = folder.path();
    fs::create_dir(at.join("plugins")).unwrap();
    let at = at.to_str().unwrap();
    let library = ["-shared", "-fPIC", "-w"];
    cc(
        "genuine.c",
        &format!("{at}/libcuda.so.1"),
        &[&library[..], &["-Wl,-soname,libcuda.so.1", "-ldl"]].concat(),
    );
    cc(
        "plugin.c",
        &format!("{at}/plugins/libplugin.so"),
        &[&library[..], &["-ldl"]].concat(),
    );
    cc(
        "needed.c",
        &format!("{at}/needed"),
        &["-w", &format!("-L{at}"), "-l:libcuda.so.1"],
    );
    cc(
        "opened.c",
        &format!("{at}/opened"),
        &["-w", "-pthread", "-ldl"],
    );
    cc(
        "runpath.c",
        &format!("{at}/runpath"),
        &["-Wl,--enable-new-dtags,-rpath,$ORIGIN/plugins", "-ldl"],
    );
    Fixtures {
        folder,
        shim: artifact("libmpsshim.so"),
    }
});

fn cc(source: &str, to: &str, arguments: &[&str]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures/loader")
        .join(source);
    let done = Command::new("cc")
        .arg("-o")
        .arg(to)
        .arg(&source)
        .args(arguments)
        .status()
        .expect("cc is installed");
    assert!(done.success(), "{} does not compile", source.display());
}

impl Fixtures {
    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    /// A fixture program under the shim, with the fake driver as the genuine one and no daemon.
    fn program(&self, name: &str) -> Command {
        let mut program = Command::new(self.path(name));
        program
            .env_clear()
            .env("LD_PRELOAD", &self.shim)
            .env("MPSSHIM_CUDA_LIBRARY", self.path("libcuda.so.1"))
            .env("MPSSHIM_PIPE_DIRECTORY", self.path("no-daemon"));
        program
    }

    fn opened(&self, arguments: &[&str]) -> Command {
        let mut program = self.program("opened");
        program.args(arguments);
        program
    }
}

/// Runs a program to its end, which must come.
fn finish(program: &mut Command) -> Output {
    let mut child = program
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("{program:?} hangs: {:?}", child.wait_with_output());
        }
        thread::sleep(Duration::from_millis(2));
    }
    child.wait_with_output().unwrap()
}

/// Runs a program that must succeed and say exactly `expected`, and nothing on standard error.
#[track_caller]
fn says(program: &mut Command, expected: &str) {
    let output = finish(program);
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "",
        "{program:?} printed"
    );
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        expected,
        "{program:?}"
    );
    assert!(output.status.success(), "{program:?}: {}", output.status);
}

const COUNTED: &str = "shim 1\ninit 0\ncount 0 4242\n";

#[test]
fn exports_are_exactly_those_of_the_table() {
    let file = fs::read(&FIXTURES.shim).unwrap();
    let expected = table::symbols().chain(INTERPOSED.iter().copied());
    assert_eq!(exported(&file), expected.map(str::to_owned).collect());
}

#[test]
fn soname_is_the_drivers() {
    let output = Command::new("readelf")
        .arg("-d")
        .arg(&FIXTURES.shim)
        .output()
        .expect("readelf is installed");
    let dynamic = String::from_utf8(output.stdout).unwrap();
    assert!(dynamic.contains("soname: [libcuda.so.1]"), "{dynamic}");
}

#[test]
fn linked_program_reaches_the_shim() {
    // The library search does not find the fake driver: only the shim can have satisfied the dependency.
    let expected =
        "early 3\narguments 1111 1235\ninit 0\ncount 0 4242\narguments 1111 1235\ncopy 2222\n";
    says(&mut FIXTURES.program("needed"), expected);
}

#[test]
fn every_name_of_the_driver_opens_the_shim() {
    let absolute = FIXTURES.path("libcuda.so.1");
    for name in [
        "libcuda.so.1",
        "libcuda.so",
        &absolute,
        "/no/such/folder/libcuda.so.1",
    ] {
        says(&mut FIXTURES.opened(&[name]), COUNTED);
    }
}

#[test]
fn the_caller_of_a_lookup_still_counts() {
    says(
        &mut FIXTURES.program("runpath"),
        "plugin 77 1\nnothing 0\nitself 1\nnext 1\ndefault 1\nnvml 12 3\n",
    );
}

#[test]
fn disabled_shim_passes_everything_through() {
    says(
        FIXTURES
            .opened(&["libcuda.so.1"])
            .env("MPSSHIM_DISABLE", "1"),
        COUNTED,
    );
}

#[test]
fn pointer_taken_before_init_is_good_after_it() {
    says(
        &mut FIXTURES.opened(&["libcuda.so.1", "pointer"]),
        "shim 1\nearly 3 -1\ninit 0\ncount 0 4242\n",
    );
}

#[test]
fn init_in_many_threads_at_once() {
    says(&mut FIXTURES.opened(&["libcuda.so.1", "threads"]), COUNTED);
}

#[test]
fn init_that_fails_may_be_called_again() {
    let mut program = FIXTURES.opened(&["libcuda.so.1", "twice"]);
    says(
        program.env("FAKE_INIT_FAILURES", "1"),
        "shim 1\ninit 999\ninit 0\ncount 0 4242\n",
    );
    says(
        &mut FIXTURES.opened(&["libcuda.so.1", "twice"]),
        "shim 1\ninit 0\ninit 0\ncount 0 4242\n",
    );
    says(
        &mut FIXTURES.opened(&["libcuda.so.1", "twice", "5"]),
        "shim 1\ninit 1\ninit 0\ncount 0 4242\n",
    );
}

#[test]
fn init_may_be_called_from_within_init() {
    says(
        FIXTURES.opened(&["libcuda.so.1"]).env("FAKE_REENTER", "1"),
        COUNTED,
    );
}

#[test]
fn forked_child_gets_the_genuine_answer() {
    let expected = format!("{COUNTED}child 3 -1\nchild init 3\nparent 0 4242\n");
    says(&mut FIXTURES.opened(&["libcuda.so.1", "fork"]), &expected);
}

#[test]
fn function_that_the_genuine_driver_lacks_is_not_supported() {
    says(
        &mut FIXTURES.opened(&["libcuda.so.1", "missing"]),
        &format!("{COUNTED}missing 801\n"),
    );
}

#[test]
fn lookups_without_a_daemon_are_the_genuine_drivers() {
    let queries = [
        "cuDeviceGetCount 12000 0",
        "cuMemcpyHtoD 12000 0",
        "cuFuture 99999 0",
    ];
    let arguments: Vec<_> = queries.iter().flat_map(|query| query.split(' ')).collect();
    let expected = "shim 1\n\
        cuDeviceGetCount 12000 0: 0 0 cuDeviceGetCount\n\
        cuMemcpyHtoD 12000 0: 0 0 cuMemcpyHtoD_v2\n\
        cuFuture 99999 0: 0 0 unnamed\n\
        null 1 1\n\
        no status 0\n";
    says(
        &mut FIXTURES.opened(&[&["libcuda.so.1", "lookup"], &arguments[..]].concat()),
        expected,
    );
}

#[test]
fn lookups_are_answered_from_the_table() {
    // Without a genuine driver there is nothing else to ask.
    let queries = [
        ("cuInit 2000 0", "0 0 cuInit"),
        ("cuMemcpyHtoD 2000 0", "0 0 cuMemcpyHtoD"),
        ("cuMemcpyHtoD 12000 1", "0 0 cuMemcpyHtoD_v2"),
        ("cuMemcpyHtoD 12000 2", "0 0 cuMemcpyHtoD_v2_ptds"),
        ("cuGetProcAddress 12000 0", "0 0 cuGetProcAddress_v2"),
        ("cuLibraryLoadData 11080 0", "0 2 -"),
        ("cuMemcpyHtoD 6050 2", "0 2 -"),
        ("cuMemcpyHtoD_v2 12000 0", "0 1 -"),
        ("cudbgMain 13000 0", "0 1 -"),
        ("cuNoSuchCall 13000 0", "0 1 -"),
        ("cuInit 99999 0", "1 -1 untouched"),
        ("cuInit 12000 4", "1 -1 untouched"),
    ];
    let mut arguments = vec!["libcuda.so.1", "lookup"];
    let mut expected = String::from("shim 1\n");
    for (query, answer) in queries {
        arguments.extend(query.split(' '));
        expected += &format!("{query}: {answer}\n");
    }
    expected += "null 1 1\nno status 0\n";
    says(
        FIXTURES
            .opened(&arguments)
            .env("MPSSHIM_CUDA_LIBRARY", "/no/such/driver"),
        &expected,
    );
}

#[test]
fn driver_is_found_as_the_loader_would() {
    // Before the fake driver come a link to the shim and a copy of it, which are not the genuine driver.
    let folders = TempDir::new().unwrap();
    let mut path = Vec::new();
    for name in ["empty", "link", "copy", "garbage"] {
        fs::create_dir(folders.path().join(name)).unwrap();
        path.push(folders.path().join(name));
    }
    symlink(&FIXTURES.shim, path[1].join("libcuda.so.1")).unwrap();
    fs::copy(&FIXTURES.shim, path[2].join("libcuda.so.1")).unwrap();
    fs::write(path[3].join("libcuda.so.1"), "no library").unwrap();
    path.push(FIXTURES.folder.path().to_owned());
    let path = std::env::join_paths(path).unwrap();
    let mut program = FIXTURES.opened(&["libcuda.so.1"]);
    says(
        program
            .env_remove("MPSSHIM_CUDA_LIBRARY")
            .env("LD_LIBRARY_PATH", path),
        COUNTED,
    );
}

#[test]
fn configured_driver_that_does_not_open_is_an_error_that_names_it() {
    let copy = FIXTURES.path("copy-of-shim.so");
    fs::copy(&FIXTURES.shim, &copy).unwrap();
    for driver in ["/no/such/driver.so", &copy] {
        // There would be another to fall back to.
        let mut program = FIXTURES.opened(&["libcuda.so.1"]);
        program
            .env("MPSSHIM_CUDA_LIBRARY", driver)
            .env("LD_LIBRARY_PATH", FIXTURES.folder.path());
        says(&mut program, "shim 1\ninit 303\ncount 3 -1\n");
        let output = finish(program.env("MPSSHIM_LOG", "warn"));
        let log = String::from_utf8_lossy(&output.stderr);
        assert!(
            log.contains(driver) && log.contains("MPSSHIM_CUDA_LIBRARY"),
            "{log}"
        );
    }
}

#[test]
fn log_goes_where_the_setting_says() {
    let file = FIXTURES.path("shim.log");
    says(
        FIXTURES
            .opened(&["libcuda.so.1"])
            .env("MPSSHIM_LOG", format!("debug:{file}")),
        COUNTED,
    );
    let log = fs::read_to_string(&file).unwrap();
    assert!(
        log.contains("cuInit") && log.contains("PassThrough"),
        "{log}"
    );
}
