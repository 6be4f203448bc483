//! Device memory that sessions share (`cuIpcGetMemHandle`, `cuIpcOpenMemHandle`).

use super::{Lasting, Lost, Making, failed};
use crate::engine::base::description::Record;
use crate::engine::base::kinds::Kind;
use crate::engine::gpu::devices::Grant;
use crate::engine::lasting::{describe, describe_gone};
use crate::engine::objects::shares::Token;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use crate::keeper::{self, Name};
use mpsshim_api::cuda::*;
use mpsshim_proto::arena;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Memory of the session's that others may open.
pub struct Given;

impl Lasting for Given {
    const KIND: Kind = Kind::Given;
    /// Bytes, and the token in its handle.
    type State = (u64, Token);

    fn make(
        record: &Record,
        (len, token): Self::State,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let start = record.key;
        let below = session.objects.grants.range(..=start).next_back();
        let grant = below.map(|(_, grant)| Arc::clone(grant));
        // The handle of memory that was freed opens nothing.
        if let Some(grant) = grant.filter(|grant| start - grant.start < grant.len) {
            keep_in_place(session, &grant);
            let who = (session.shared.info.session, session.shared.info.uid);
            let shares = &making.shared.roster.shares;
            let sharing = &mut session.objects.sharing;
            sharing.give_as(shares, who, (start, len, token), &grant);
            session.shared.connected.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Memory of the session's that others have by a descriptor (`cuMemGetHandleForAddressRange`).
pub struct Stays;

impl Lasting for Stays {
    const KIND: Kind = Kind::Stays;
    /// Nothing.
    type State = ();

    fn make(
        record: &Record,
        (): Self::State,
        session: &mut Session,
        _: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let grant = session.objects.grants.get(&record.key).map(Arc::clone);
        if let Some(grant) = grant {
            keep_in_place(session, &grant);
        }
        Ok(())
    }
}

/// State of a record of memory that a session has open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenedState {
    /// Bytes.
    len: u64,
    /// First address and bytes of the block that it is a part of.
    block: (u64, u64),
    /// The server's ordinal of the device.
    device: u32,
    /// Number of closes still required.
    count: u32,
    /// Ordinals of the devices for which it was opened.
    users: Vec<u32>,
}

/// First address of the block of which the memory in a record of [`Kind::Opened`] is a part.
pub fn block_of(record: &Record) -> Option<u64> {
    let state: OpenedState = record.state()?;
    Some(state.block.0)
}

/// Open memory of another session. After the end of its owner, the keeper still holds a descriptor for this session.
pub struct Opened;

impl Lasting for Opened {
    const KIND: Kind = Kind::Opened;
    type State = OpenedState;

    fn make(
        record: &Record,
        state: OpenedState,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let shared = making.shared;
        let (start, len) = state.block;
        let grant = match shared.roster.shares.restored(start) {
            Some(grant) => grant,
            None => {
                let memory = making.take(Name::numbered(keeper::Kind::Memory, start))?;
                let adopted = adopt(shared, session, (start, len, state.device), memory);
                adopted.map_err(failed("memory of another program", record))?
            }
        };
        let open = || -> Result<(), CUresult> {
            let mut users = BTreeSet::new();
            for user in state.users {
                let user = shared.gpu.device(user)?;
                if user.ordinal != grant.device {
                    user.may_use(&shared.gpu.driver, &grant)?;
                }
                users.insert(user.ordinal);
            }
            let (account, range) = (&session.account, (record.key, state.len));
            let sharing = &mut session.objects.sharing;
            sharing.note_opened(account, range, grant, (state.count, users));
            Ok(())
        };
        let opened = open().map_err(failed("memory of another program", record));
        session.shared.connected.store(true, Ordering::Relaxed);
        opened
    }
}

fn adopt(
    shared: &Shared,
    session: &Session,
    (start, len, device): (u64, u64, u32),
    memory: OwnedFd,
) -> Result<Arc<Grant>, CUresult> {
    let device = shared.gpu.device(device)?;
    let driver = &shared.gpu.driver;
    let grant = device.adopt(driver, &session.account, (start, len), memory)?;
    grant.note_stays();
    let grant = Arc::new(grant);
    shared.roster.shares.note_restored(&grant);
    Ok(grant)
}

/// Memory that another session or process may use does not move to host memory.
pub fn keep_in_place(session: &Session, grant: &Grant) {
    if grant.note_stays() && !arena::is_managed(grant.start) {
        let suspension = &session.shared.suspension;
        suspension.take_movable(grant.device, grant.len);
    }
}

/// Describes the memory from this address on that others may open, or that they may not any more.
pub fn describe_given(session: &mut Session, start: u64) {
    match session.objects.sharing.given(start) {
        Some(given) => {
            session.shared.connected.store(true, Ordering::Relaxed);
            describe::<Given>(session, start, &given);
        }
        None => describe_gone::<Given>(session, start),
    }
}

/// Describes the memory from this address on that the session has opened or closed.
pub fn describe_opened(session: &mut Session, start: u64) {
    let state = session
        .objects
        .sharing
        .opened(start)
        .map(|open| OpenedState {
            len: open.len,
            block: (open.grant.start, open.grant.len),
            device: open.grant.device.into(),
            count: open.count,
            users: open.users.iter().map(|user| (*user).into()).collect(),
        });
    match state {
        Some(state) => {
            session.shared.connected.store(true, Ordering::Relaxed);
            describe::<Opened>(session, start, &state);
        }
        None => describe_gone::<Opened>(session, start),
    }
}
