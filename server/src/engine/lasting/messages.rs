//! Objects that messages create, change or destroy, according to the column *change* of the operations' table.

use super::{Lasting, Lost, Making};
use crate::engine::base::bounds;
use crate::engine::base::call::Incoming;
use crate::engine::base::description::Record;
use crate::engine::base::kinds::Kind;
use crate::engine::images::{Found, ImageStore};
use crate::engine::lasting::contents::forget_files;
use crate::engine::session::Session;
use mpsshim_model::client::ClientInfo;
use mpsshim_model::limits::Terms;
use mpsshim_proto::handle::{Handle, Kind as HandleKind};
use mpsshim_proto::message::{GetFunction, Op};
use mpsshim_proto::ops::Change;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Bytes of an image from which on analyzing it takes longer than describing the result.
const LONG: usize = 32 << 10;

/// The first record of a description.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Client {
    /// Identity of the client.
    pub info: ClientInfo,
    /// Its terms when it connected.
    pub terms: Terms,
    /// Its share of dispatch in relation to others.
    pub weight: u32,
    /// Limits of device memory set by the daemon, in bytes, by ordinal.
    pub memory: BTreeMap<usize, u64>,
    /// Guarantees of device memory that the server had set, in bytes, by ordinal.
    pub guarantee: BTreeMap<usize, u64>,
}

/// Findings about an image.
pub struct Leaves;

impl Lasting for Leaves {
    const KIND: Kind = Kind::Leaves;
    /// The image's SHA-256, and the results of the analysis.
    type State = ([u8; 32], Found);

    fn make(
        _: &Record,
        (hash, found): Self::State,
        _: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        making.shared.images.note_findings(&hash, found);
        // The record is written again when the image's first function is looked up.
        Ok(())
    }
}

impl Lasting for Client {
    const KIND: Kind = Kind::Client;
    type State = Client;

    /// The session exists already: it was made from this record.
    fn make(_: &Record, _: Client, _: &mut Session, _: &mut Making<'_>) -> Result<(), Lost> {
        Ok(())
    }
}

/// Passes the session's descriptors to the keeper, and writes the record of the client.
pub fn begin_description(session: &mut Session, images: &ImageStore) {
    let client = Client {
        info: session.shared.info.clone(),
        terms: session.shared.terms,
        weight: session.shared.standing.weight(),
        memory: session.account.limits_of_devices(),
        guarantee: session.shared.suspension.asked_guarantees(),
    };
    session.lasting.kept = session.shared.keep(&images.gpu.keeping);
    session.write_down(Record::of(Kind::Client, 0, 0, &client));
    session.note_bonds(images);
}

/// Describes an executed message that changes the session's state.
pub fn note_change(session: &mut Session, images: &ImageStore, message: Incoming<'_>) {
    if session.lasting.kept {
        write_change(session, images, message);
        if !session.inbox.held.is_replaying() {
            session.note_executed(message);
        }
    }
}

fn write_change(session: &mut Session, images: &ImageStore, message: Incoming<'_>) {
    let op = message.op;
    let (kind, at) = match op.change() {
        Change::Makes(at) => (Kind::Makes, at),
        Change::Sets(at) => (Kind::Sets, at),
        Change::Ends(at) => (Kind::Ends, at),
        Change::Own => return,
        Change::Nothing | Change::Binds => return session.note_bonds(images),
    };
    let key = match op {
        // A device: the rest of the word is no part of the key, which must not be that of an object.
        Op::Attach | Op::LimitMemory => message.word(at) & u64::from(u32::MAX),
        _ => message.word(at),
    };
    if key == 0 && op == Op::GetFunction {
        return;
    }
    if kind == Kind::Ends {
        session.write_down(Record::ending(kind, op as u16, key));
    } else if message.len() as usize > bounds::DESCRIBED {
        session.lasting.undescribed = true;
    } else {
        session.write_down(Record::of(kind, op as u16, key, &message.whole()));
    }
    match op {
        Op::ImageLoad => {
            note_whether_kept(session, key);
            images.changes.note();
        }
        Op::ImageUnload => {
            forget_files(session, images, |image| image == key);
            session.lasting.unkept_images.remove(&key);
            session.lasting.appraised.remove(&key);
            session.lasting.looked_into.retain(|(of, _)| *of != key);
            images.changes.note();
        }
        Op::GetFunction => {
            if let Ok(body) = message.body::<GetFunction>() {
                let is_library = Handle(body.parent).kind() == Some(HandleKind::Library);
                // The driver loads a library with its first function.
                if is_library
                    && session
                        .lasting
                        .looked_into
                        .insert((body.parent, body.device))
                {
                    images.changes.note();
                }
                appraise_image(session, images, body.parent);
            }
        }
        _ => {}
    }
    session.note_bonds(images);
}

/// Binds the session for as long as it has a new image if the keeper does not hold the content.
fn note_whether_kept(session: &mut Session, handle: u64) {
    if session
        .objects
        .image(handle)
        .is_ok_and(|image| !image.content().is_kept())
    {
        session.lasting.unkept_images.insert(handle);
    }
}

/// Checks whether an image binds the session, after one of its functions was looked up.
fn appraise_image(session: &mut Session, images: &ImageStore, handle: u64) {
    let Ok(image) = session.objects.image(handle) else {
        return;
    };
    let content = image.content();
    let leaves = images.leaves(content);
    let (hash, is_long) = (*content.hash(), content.len() > LONG);
    session.lasting.binding_images |= leaves.addresses;
    if !is_long || session.lasting.appraised.contains_key(&handle) {
        return;
    }
    let found = images.findings(content);
    let whole = Record::of(Kind::Leaves, 0, handle, &(hash, &found));
    let others: usize = session.lasting.appraised.values().sum();
    let (bytes, record) = match others + whole.bytes.len() <= bounds::FINDINGS {
        true => (whole.bytes.len(), whole),
        false => {
            let short = Found::of(found.leaves);
            (0, Record::of(Kind::Leaves, 0, handle, &(hash, short)))
        }
    };
    session.lasting.appraised.insert(handle, bytes);
    session.write_down(record);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::Fixture;
    use mpsshim_api::cuda::CUDA_SUCCESS;
    use mpsshim_proto::message::context::LimitMemory;
    use mpsshim_proto::message::{Object, StreamCreate};

    #[test]
    fn a_limit_of_a_device_does_not_end_with_an_object() {
        let mut test = Fixture::with_keeper(&[]);
        let stream = Handle::new(HandleKind::Stream, 1, 0).0;
        let body = StreamCreate {
            stream,
            ..StreamCreate::default()
        };
        assert_eq!(test.told(Op::StreamCreate, &body, &[]), CUDA_SUCCESS);
        // The bytes of the message are those of the handle.
        let body = LimitMemory {
            device: 0,
            pad: (stream >> 32) as u32,
            bytes: 1 << 40,
        };
        assert_eq!(test.told(Op::LimitMemory, &body, &[]), CUDA_SUCCESS);
        let limits = |test: &Fixture| {
            let records = test.session.shared.description.records();
            let mut ops = records.iter().map(|record| record.op);
            ops.any(|op| op == Op::LimitMemory as u16)
        };
        assert!(limits(&test));
        let end = Object { object: stream };
        assert_eq!(test.told(Op::StreamDestroy, &end, &[]), CUDA_SUCCESS);
        assert!(limits(&test));
    }
}
