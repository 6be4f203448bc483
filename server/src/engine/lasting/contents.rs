//! Contents of variables that do not fit into a description: files, which the keeper holds.

use crate::engine::base::bounds;
use crate::engine::base::description::Record;
use crate::engine::base::kinds::Kind;
use crate::engine::images::ImageStore;
use crate::engine::lasting::Left;
use crate::engine::objects::snapshot::{Contents, Described, VariablesState};
use crate::engine::session::Session;
use crate::keeper::{self, Name};
use mpsshim_proto::shm;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};

/// Name of the file with the contents of an image's variables on a device, by the server's ordinal; each file of the image
/// has another generation.
fn name_of(session: u64, (image, device): (u64, u32), generation: u32) -> Name {
    let mut name = Name::numbered(keeper::Kind::Stored, image);
    name.id[8..16].copy_from_slice(&session.to_le_bytes());
    name.id[16..20].copy_from_slice(&device.to_le_bytes());
    // Files of device memory have zeros here.
    name.id[20] = 1;
    name.id[24..28].copy_from_slice(&generation.to_le_bytes());
    name
}

/// The descriptors that belong to a session's records of contents.
pub fn take_files(session: u64, records: &[Record], left: &mut Left) -> Left {
    let of_contents = records
        .iter()
        .filter(|record| record.kind == Kind::Variables);
    let names = of_contents.filter_map(|record| name_in(session, record));
    names.filter_map(|name| left.remove_entry(&name)).collect()
}

/// Name of the file that a record of contents names.
pub fn name_in(session: u64, record: &Record) -> Option<Name> {
    match record.state::<VariablesState>()? {
        VariablesState::File { generation, .. } => {
            let place = (record.key, record.op.into());
            Some(name_of(session, place, generation))
        }
        VariablesState::Here(_) => None,
    }
}

fn file_of(bytes: &[u8]) -> io::Result<OwnedFd> {
    let mut file = File::from(shm::sealed_memfd(c"variables", bytes.len() as u64)?);
    file.write_all(bytes)?;
    Ok(file.into())
}

/// Puts contents into a file of this generation, which the keeper holds. Returns the state of the record; `None` if there is
/// no room.
pub fn store<'a>(
    session: &Session,
    images: &ImageStore,
    place: (u64, u32),
    generation: u32,
    contents: &'a Contents,
) -> Option<VariablesState<&'a Contents>> {
    let bytes = postcard::to_stdvec(contents).ok()?;
    let name = name_of(session.shared.info.session, place, generation);
    let file = file_of(&bytes).inspect_err(|error| {
        tracing::warn!("contents of variables are not kept: {error}");
    });
    let (keeping, holder) = (&images.gpu.keeping, &session.shared.kept);
    let is_kept = keeping.keep(name, file.ok()?.as_fd(), holder);
    let len = bytes.len() as u64;
    is_kept.then_some(VariablesState::File { generation, len })
}

/// Makes the keeper close the file of this generation.
pub fn forget(session: &Session, images: &ImageStore, place: (u64, u32), generation: u32) {
    let name = name_of(session.shared.info.session, place, generation);
    images.gpu.keeping.forget(name);
}

/// Makes the keeper close all files with contents of variables of these images.
pub fn forget_files(session: &mut Session, images: &ImageStore, is_of_it: impl Fn(u64) -> bool) {
    for ((image, device), described) in session.lasting.saved.take_contents(is_of_it) {
        if let Described::File { generation, .. } = described {
            forget(session, images, (image, device.into()), generation);
        }
    }
}

/// The contents in a file.
///
/// # Errors
/// If it is not such a file, in words.
pub fn load(file: OwnedFd, len: u64) -> Result<Contents, String> {
    const MOST: u64 = bounds::SAVED_IN_FILES + (1 << 20);
    let mut file = File::from(file);
    let is_whole = file.metadata().is_ok_and(|found| found.len() == len) && len <= MOST;
    if !is_whole {
        return Err("its file has another size".to_owned());
    }
    let mut bytes = vec![0; len as usize];
    io::Seek::rewind(&mut file)
        .and_then(|()| file.read_exact(&mut bytes))
        .map_err(|error| error.to_string())?;
    postcard::from_bytes(&bytes).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_are_read_from_their_file_alone() {
        let contents: Contents = vec![(b"table\0".to_vec(), vec![7; 300 << 10])];
        let bytes = postcard::to_stdvec(&contents).expect("bytes");
        let (file, len) = (|| file_of(&bytes).expect("a file"), bytes.len() as u64);
        assert_eq!(load(file(), len), Ok(contents));
        assert!(load(file(), len - 1).is_err() && load(file(), u64::MAX).is_err());
        let broken = file_of(&bytes[..bytes.len() - 1]).expect("a file");
        assert!(load(broken, len - 1).is_err());
    }

    #[test]
    fn each_file_has_a_name_of_its_own() {
        let names = [
            name_of(1, (5, 0), 0),
            name_of(1, (5, 0), 1),
            name_of(1, (5, 1), 0),
            name_of(1, (6, 0), 0),
            name_of(2, (5, 0), 0),
            Name::numbered(keeper::Kind::Stored, 5),
        ];
        for (at, name) in names.iter().enumerate() {
            assert!(names[..at].iter().all(|other| other != name), "{at}");
        }
    }
}
