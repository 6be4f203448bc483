//! The release of this server.

use crate::engine::FORMATS;
use mpsshim_control::link::{LINK_VERSION, OLDEST_LINK};
use mpsshim_control::releases::Spoken;
use mpsshim_proto::release::ServerNote;
use mpsshim_proto::wire::{self, SPOKEN};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The note by which the daemon knows the executable's release before it starts it.
pub const NOTE: ServerNote = ServerNote::of(VERSION, (OLDEST_LINK, LINK_VERSION), SPOKEN, &FORMATS);

/// The same, for the daemon that takes this server over.
pub fn spoken() -> Spoken {
    Spoken::of_this_release(&FORMATS)
}

/// Whether the note tells the truth.
///
/// # Errors
/// The declarations have changed without the fingerprint, so that clients and servers would misunderstand each other.
pub fn check() -> anyhow::Result<()> {
    let found = wire::fingerprint();
    anyhow::ensure!(
        found == wire::OWN.fingerprint,
        "this build is not consistent: its fingerprint is {found:#018x}, and {:#018x} in proto/src/wire.rs",
        wire::OWN.fingerprint
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpsshim_proto::release::MOST_SPOKEN;

    #[test]
    fn the_note_has_room_for_all() {
        assert!(SPOKEN.len() <= MOST_SPOKEN && FORMATS.len() <= MOST_SPOKEN);
        check().expect("the declared fingerprint");
    }
}
