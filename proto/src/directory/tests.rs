use super::*;
use std::os::unix::fs::{lchown, symlink};
use tempfile::TempDir;

const SOCKETS: Walk = Walk {
    purpose: Purpose::Sockets,
    create: None,
    named: false,
    any_owner: false,
};
const LOGS: Walk = Walk {
    purpose: Purpose::Logs,
    ..SOCKETS
};
const OTHER: u32 = 12345;

fn uid() -> u32 {
    // SAFETY: a plain system call that cannot fail.
    unsafe { libc::geteuid() }
}

/// A directory of this user's that no other user can reach.
struct Place {
    path: PathBuf,
    _temporary: TempDir,
}

impl Place {
    fn new() -> Place {
        let temporary = tempfile::tempdir().expect("a temporary directory");
        let path = temporary.path().canonicalize().expect("a path");
        Place {
            path,
            _temporary: temporary,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    fn directory(&self, name: &str, mode: u32) -> PathBuf {
        let path = self.path(name);
        fs::create_dir(&path).expect("create");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("mode");
        path
    }

    fn link(&self, name: &str, target: impl AsRef<Path>) -> PathBuf {
        let path = self.path(name);
        symlink(target, &path).expect("link");
        path
    }

    /// The directory itself, as [`open`] goes through it.
    fn descriptor(&self) -> OwnedFd {
        open(&self.path, SOCKETS).expect("trusted")
    }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("there").mode() & 0o7777
}

fn opens(path: &Path, walk: Walk, expected: &Path) {
    let opened = open(path, walk).unwrap_or_else(|refused| panic!("{refused}"));
    let (opened, expected) = (stat(&opened), fs::metadata(expected));
    let (opened, expected) = (opened.expect("open"), expected.expect("there"));
    assert_eq!(
        (opened.st_dev, opened.st_ino),
        (expected.dev(), expected.ino()),
        "{}",
        path.display()
    );
}

fn refused(path: &Path, walk: Walk) -> Refused {
    match open(path, walk) {
        Ok(_) => panic!("{} is accepted", path.display()),
        Err(refused) => refused,
    }
}

fn is_writable_by_others(path: &Path, walk: Walk, at: &Path, mode: u32) {
    let expected = format!("others can write in {} (mode {mode:04o})", at.display());
    assert_eq!(refused(path, walk).to_string(), expected);
}

fn is_link(path: &Path, link: &Path) {
    let refused = refused(path, SOCKETS);
    assert!(!refused.is_absent());
    let expected = format!("{} is a symbolic link that is not followed", link.display());
    assert_eq!(refused.to_string(), expected);
}

fn is_close_on_exec(fd: &OwnedFd) -> bool {
    // SAFETY: a plain system call on a descriptor of ours.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) == libc::FD_CLOEXEC }
}

/// An `fstat` result for a directory with this owner, group and mode.
fn found(owner: u32, group: u32, mode: u32) -> libc::stat {
    let root = open_at(None, c"/", libc::O_DIRECTORY).expect("open");
    let mut found = stat(&root).expect("stat");
    (found.st_uid, found.st_gid) = (owner, group);
    found.st_mode = libc::S_IFDIR | mode;
    found
}

fn owner(uid: u32, walk: Walk) -> Owner {
    Owner {
        uid,
        walk,
        in_sticky: false,
        unmapped: None,
    }
}

#[test]
fn a_user_s_own_directory_comes_before_the_system_s() {
    let temporary = PathBuf::from("/tmp/mpsshim-1000");
    let system = PathBuf::from(SYSTEM);
    let of_root = candidates(0, Some(OsStr::new("/proc/self")));
    assert_eq!(of_root, [Path::new(SYSTEM)]);
    let both = [temporary, system];
    assert_eq!(candidates(1000, None), both);
    // Another user's directory, a missing one, and a relative path.
    for runtime in ["/proc/1", "/nowhere", "proc"] {
        assert_eq!(
            candidates(1000, Some(OsStr::new(runtime))),
            both,
            "{runtime}"
        );
    }
    if uid() != 0 {
        let own = candidates(uid(), Some(OsStr::new("/proc/self")));
        assert_eq!(own[0], Path::new("/proc/self/mpsshim"));
        assert_eq!(own.len(), 3);
    }
}

#[test]
fn a_path_is_walked_without_what_means_nothing() {
    assert_eq!(
        components(Path::new("//a/./b/..//.c/")),
        ["a", "b", "..", ".c"]
    );
    let place = Place::new();
    place.directory("a", 0o755);
    let inner = place.directory("a/b", 0o700);
    for path in ["a/b", "a/./b//", "a/b/../b", "a/../a/b/."] {
        opens(&place.path(path), SOCKETS, &inner);
    }
    opens(Path::new("/"), LOGS, Path::new("/"));
}

#[test]
fn what_is_not_there_is_absent_and_stays_so() {
    let place = Place::new();
    fs::write(place.path("file"), "").expect("write");
    for (path, at) in [("a/b", "a"), ("file", "file"), ("file/a", "file")] {
        let refused = refused(&place.path(path), SOCKETS);
        assert!(refused.is_absent(), "{refused}");
        let at = format!("{}: ", place.path(at).display());
        assert!(refused.to_string().starts_with(&at), "{refused}");
    }
    assert!(of_client(&place.path("a"), true, false).is_err());
    assert!(!place.path("a").exists());
}

#[test]
fn a_name_that_no_directory_can_have_is_an_error() {
    let place = Place::new();
    let create = Walk {
        create: Some(0o700),
        ..SOCKETS
    };
    for (name, number) in [
        ("a\0b".to_owned(), libc::EINVAL),
        ("a".repeat(256), libc::ENAMETOOLONG),
    ] {
        let refused = refused(&place.path(&name), create);
        assert!(!refused.is_absent());
        let Refused::Io { source, .. } = refused else {
            panic!("{refused}");
        };
        assert_eq!(source.raw_os_error(), Some(number));
    }
}

#[test]
fn directories_are_created_with_their_permissions_whatever_the_umask() {
    let place = Place::new();
    for (name, create) in [("open", 0o1777), ("half", 0o711), ("closed", 0o700)] {
        let path = place.path(name).join("above/last");
        let walk = Walk {
            create: Some(create),
            ..LOGS
        };
        open(&path, walk).expect("created");
        assert_eq!(mode(&path), create, "{name}");
        for above in path.ancestors().skip(1).take(2) {
            assert_eq!(mode(above), 0o755, "{}", above.display());
        }
        // It is opened as it is from now on.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o500)).expect("mode");
        opens(&path, walk, &path);
        assert_eq!(mode(&path), 0o500, "{name}");
    }
}

#[test]
fn a_directory_that_has_been_created_meanwhile_keeps_its_permissions() {
    let place = Place::new();
    let there = place.directory("there", 0o700);
    let opened = make(&place.descriptor(), c"there", 0o755).expect("opened");
    assert_eq!(
        stat(&opened).expect("stat").st_ino,
        fs::metadata(&there).expect("there").ino()
    );
    assert_eq!(mode(&there), 0o700);
}

#[test]
fn permissions_of_what_is_put_in_place_of_a_new_directory_are_not_changed() {
    let place = Place::new();
    place.directory("directory", 0o700);
    place.link("link", "directory");
    fs::write(place.path("file"), "").expect("write");
    let above = place.descriptor();
    let opened = open_to_change(&above, c"directory").expect("opened");
    assert!(is_close_on_exec(&opened));
    for name in [c"link", c"file"] {
        let error = open_to_change(&above, name).expect_err("no directory");
        assert_eq!(error.raw_os_error(), Some(libc::ENOTDIR), "{name:?}");
    }
}

#[test]
fn symbolic_links_of_this_user_are_followed() {
    let place = Place::new();
    place.directory("a", 0o755);
    let inner = place.directory("a/b", 0o700);
    place.directory("sticky", 0o1755);
    for (link, target) in [
        ("absolute", place.path("a")),
        ("relative", "a".into()),
        ("through", "a/./b/../../relative".into()),
        ("a/above", "../relative".into()),
        ("sticky/here", "../a".into()),
    ] {
        let link = place.link(link, target);
        opens(&link.join("b"), SOCKETS, &inner);
        opens(&link.join("b/.."), SOCKETS, &place.path("a"));
    }
    let dangling = place.link("dangling", "nothing");
    assert!(refused(&dangling, SOCKETS).is_absent());
}

#[test]
fn a_path_leads_through_forty_links() {
    let place = Place::new();
    place.directory("0", 0o700);
    for link in 1..=41 {
        place.link(&link.to_string(), (link - 1).to_string());
    }
    opens(&place.path("40"), SOCKETS, &place.path("0"));
    // The last of the links is one too many.
    is_link(&place.path("41"), &place.path("1"));
}

#[test]
fn a_link_that_others_can_have_put_there_is_not_followed() {
    let place = Place::new();
    let inner = place.directory("inner", 0o700);
    place.directory("open", 0o1777);
    let link = place.link("open/link", &inner);
    is_link(&link, &link);
    is_link(&link.join("further"), &link);
    // The directory that the first link leads to is open to all, and the root directory is not.
    place.link("to_open", "open");
    is_link(&place.path("to_open/link"), &link);
    place.directory("open/below", 0o700);
    let below = place.link("open/below/link", &inner);
    opens(&below, SOCKETS, &inner);
}

#[test]
fn a_link_in_a_directory_of_one_s_own_group_is_followed_unless_the_sticky_bit_is_set() {
    let place = Place::new();
    let inner = place.directory("inner", 0o700);
    let group = place.directory("group", 0o775);
    let link = place.link("group/link", &inner);
    if fs::metadata(&group).expect("there").gid() != uid() {
        println!("skipped: this user has no group of the same number");
        return;
    }
    opens(&link, SOCKETS, &inner);
    fs::set_permissions(&group, fs::Permissions::from_mode(0o1775)).expect("mode");
    is_link(&link, &link);
}

#[test]
fn a_directory_that_others_can_write_in_is_refused() {
    let place = Place::new();
    let last = place.directory("last", 0o755);
    opens(&last, SOCKETS, &last);
    for open in [0o777, 0o1777, 0o702] {
        fs::set_permissions(&last, fs::Permissions::from_mode(open)).expect("mode");
        is_writable_by_others(&last, SOCKETS, &last, open);
    }
    assert!(!refused(&last, SOCKETS).is_absent());
}

#[test]
fn a_directory_below_one_that_others_can_write_in_is_refused_unless_the_sticky_bit_is_set() {
    let place = Place::new();
    let above = place.directory("above", 0o777);
    let last = place.directory("above/last", 0o700);
    for purpose in [SOCKETS, LOGS] {
        fs::set_permissions(&above, fs::Permissions::from_mode(0o777)).expect("mode");
        is_writable_by_others(&last, purpose, &above, 0o777);
        is_writable_by_others(&above.join("nothing"), purpose, &above, 0o777);
        fs::set_permissions(&above, fs::Permissions::from_mode(0o1777)).expect("mode");
        opens(&last, purpose, &last);
    }
}

#[test]
fn a_log_directory_may_be_open_to_all_with_the_sticky_bit() {
    let place = Place::new();
    let logs = place.directory("logs", 0o1777);
    for create in [None, Some(0o700)] {
        opens(&logs, Walk { create, ..LOGS }, &logs);
        assert_eq!(mode(&logs), 0o1777);
    }
}

#[test]
fn only_whoever_creates_a_log_directory_closes_it_to_others() {
    let place = Place::new();
    let directory = place.directory("directory", 0o777);
    is_writable_by_others(&directory, LOGS, &directory, 0o777);
    let create = Some(0o700);
    let sockets = Walk { create, ..SOCKETS };
    is_writable_by_others(&directory, sockets, &directory, 0o777);
    assert_eq!(mode(&directory), 0o777);
    opens(&directory, Walk { create, ..LOGS }, &directory);
    assert_eq!(mode(&directory), 0o755);
}

#[test]
fn only_an_open_log_directory_of_this_user_s_is_closed() {
    let place = Place::new();
    let directory = place.directory("directory", 0o777);
    let opened = open_at(Some(&place.descriptor()), c"directory", libc::O_DIRECTORY);
    let opened = opened.expect("open");
    let is_closed = |found: libc::stat, uid, walk| closes(&opened, &found, &owner(uid, walk));
    assert!(!is_closed(found(uid(), 0, 0o777), uid(), SOCKETS));
    assert!(!is_closed(found(OTHER, 0, 0o777), uid(), LOGS));
    assert!(!is_closed(found(uid(), 0, 0o1755), uid(), LOGS));
    assert_eq!(mode(&directory), 0o777);
    assert!(is_closed(found(uid(), 0, 0o1775), uid(), LOGS));
    assert_eq!(mode(&directory), 0o1755);
}

#[test]
fn only_root_and_this_user_are_trusted() {
    for in_sticky in [false, true] {
        let of_user = Owner {
            in_sticky,
            ..owner(1000, SOCKETS)
        };
        let trusted = [0, 1000, 1001, 65534].map(|uid| of_user.is_trusted(uid));
        assert_eq!(trusted, [true, true, false, false]);
        assert!(!owner(0, SOCKETS).is_trusted(1000));
    }
    let refused = owner(1000, SOCKETS).check(Path::new("/a"), 1001);
    assert_eq!(
        refused.expect_err("another user's").to_string(),
        "/a belongs to user 1001; it must belong to root or to user 1000"
    );
}

/// Any user, even one unknown to this user namespace, may create a directory in one that is open to all.
#[test]
fn users_that_are_not_known_here_are_trusted_where_the_path_is_named_or_closed_to_others() {
    for (named, in_sticky, trusted) in [
        (false, false, true),
        (false, true, false),
        (true, false, true),
        (true, true, true),
    ] {
        let walk = Walk { named, ..SOCKETS };
        let owner = Owner {
            uid: 1000,
            walk,
            in_sticky,
            unmapped: Some(65534),
        };
        assert_eq!(owner.is_trusted(65534), trusted, "{named} {in_sticky}");
        assert!(!owner.is_trusted(1001));
    }
}

#[test]
fn a_user_namespace_that_knows_all_users_shows_none_as_unknown() {
    let whole = "         0          0 4294967295\n";
    assert_eq!(unmapped_by(whole, "65534\n"), None);
    for part in [
        "0 1000 1\n",
        "0 0 65536\n",
        "0 0 1\n1 1 4294967294\n",
        "1000 1000 1\n",
    ] {
        assert_eq!(unmapped_by(part, "65534\n"), Some(65534), "{part}");
    }
    assert_eq!(unmapped_by("0 1000 1\n", "?"), None);
    let here = ["/proc/self/uid_map", "/proc/sys/kernel/overflowuid"].map(fs::read_to_string);
    if let [Ok(map), Ok(number)] = here {
        assert_eq!(unmapped(), unmapped_by(&map, &number));
    }
}

#[test]
fn others_are_all_but_the_owner_its_own_group_and_root_s_groups() {
    // Owner, group, mode; whether others may write, and whether they may if root's groups count as others too.
    for (owner, group, mode, may_write, or_a_group_of_root_s) in [
        (1000, 1000, 0o755, false, false),
        (1000, 1000, 0o775, false, false),
        (1000, 1000, 0o702, true, true),
        (1000, 100, 0o755, false, false),
        (1000, 100, 0o720, true, true),
        (1000, 0, 0o775, true, true),
        (0, 0, 0o775, false, false),
        (0, 4, 0o755, false, false),
        (0, 4, 0o775, false, true),
        (0, 4, 0o777, true, true),
    ] {
        let found = found(owner, group, mode);
        let what = format!("{owner}:{group} {mode:o}");
        assert_eq!(others_may_write(&found, true), may_write, "{what}");
        assert_eq!(
            others_may_write(&found, false),
            or_a_group_of_root_s,
            "{what}"
        );
    }
}

/// As in /var/log. A group that can replace sockets can impersonate the daemon.
#[test]
fn a_group_of_root_s_may_write_in_log_directories_only() {
    let path = Path::new("/a");
    let found = found(0, 4, 0o775);
    assert!(check_parent(path, &found, &owner(1000, SOCKETS)).is_ok());
    assert!(check_last(path, &found, &owner(1000, LOGS)).is_ok());
    let refused = check_last(path, &found, &owner(1000, SOCKETS));
    assert_eq!(
        refused.expect_err("open").to_string(),
        "others can write in /a (mode 0775)"
    );
}

#[test]
fn only_root_may_ask_for_any_user_s_directory_which_is_as_closed_as_its_own() {
    let path = Path::new("/a");
    let any = Walk {
        any_owner: true,
        ..SOCKETS
    };
    for check in [check_parent, check_last] {
        let of_other = |mode, uid, walk| check(path, &found(OTHER, OTHER, mode), &owner(uid, walk));
        assert!(of_other(0o755, 0, any).is_ok());
        for (uid, walk) in [(0, SOCKETS), (1000, any), (1000, SOCKETS)] {
            let refused = of_other(0o755, uid, walk).expect_err("another user's");
            assert!(matches!(refused, Refused::Owner { owner: OTHER, .. }));
        }
        let refused = of_other(0o757, 0, any).expect_err("open to others");
        assert!(matches!(refused, Refused::Writable { mode: 0o757, .. }));
    }
}

#[test]
fn what_belongs_to_another_user_leads_nowhere() {
    let place = Place::new();
    let theirs = place.directory("theirs", 0o755);
    let inner = place.directory("theirs/inner", 0o755);
    let link = place.link("link", "theirs/inner");
    let given = lchown(&theirs, Some(OTHER), None).and_then(|()| lchown(&link, Some(OTHER), None));
    if given.is_err() {
        println!("skipped: only root can make a directory another user's");
        return;
    }
    is_link(&link, &link);
    for path in [&theirs, &inner] {
        let refused = refused(path, SOCKETS);
        assert!(!refused.is_absent());
        assert_eq!(
            refused.to_string(),
            format!(
                "{} belongs to user {OTHER}; it must belong to root or to user {}",
                theirs.display(),
                uid()
            )
        );
        assert!(of_client(path, true, false).is_err());
        assert!(of_client(path, true, true).is_ok());
    }
}

#[test]
fn a_link_is_opened_itself_only_to_look_at_it() {
    let place = Place::new();
    let file = place.path("file");
    fs::write(&file, "").expect("write");
    place.link("link", &file);
    let link = open_at(Some(&place.descriptor()), c"link", 0).expect("open");
    let kind = stat(&link).expect("stat").st_mode & libc::S_IFMT;
    assert_eq!(kind, libc::S_IFLNK);
    assert_eq!(read_link(&link).expect("a link"), file);
    // SAFETY: plain system calls on a descriptor of ours.
    let (flags, status) = unsafe {
        let fd = link.as_raw_fd();
        (
            libc::fcntl(fd, libc::F_GETFD),
            libc::fcntl(fd, libc::F_GETFL),
        )
    };
    assert_eq!(flags, libc::FD_CLOEXEC);
    assert_eq!(status & libc::O_PATH, libc::O_PATH);
    assert!(read_link(&place.descriptor()).is_err());
}

#[test]
fn a_system_call_s_negative_result_is_its_error() {
    assert_eq!(check(0).expect("a result"), 0);
    assert_eq!(check(3).expect("a result"), 3);
    assert!(check(-1).is_err());
}

#[test]
fn a_file_in_an_open_directory_has_a_path() {
    let place = Place::new();
    fs::write(place.path("file"), "content").expect("write");
    let directory = place.descriptor();
    assert_eq!(
        fs::read_to_string(path_in(directory.as_fd(), "file")).expect("read"),
        "content"
    );
    let path = fs::read_link(path_of(directory.as_fd())).expect("a link");
    assert_eq!(path, place.path);
}
