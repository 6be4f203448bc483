//! Device memory that a session allows others of the same user to open (`cuIpcGetMemHandle`).
//!
//! A handle contains a random token that stands for one allocation of the program, which may be part of a grant. It is
//! opened at the same addresses, since all clients share one address space. The grant lives until its last holder
//! returns it.

use crate::engine::base::account::{Account, Memory};
use crate::engine::base::bounds;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::gpu::devices::Grant;
use mpsshim_api::cuda::*;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Weak};

/// Identifies a handle created by the server.
const MAGIC: [u8; 16] = *b"mpsshim memory 1";

/// A random number that cannot be guessed.
pub type Token = [u8; 32];

#[derive(Debug)]
struct Share {
    session: u64,
    uid: u32,
    start: u64,
    len: u64,
    grant: Weak<Grant>,
}

/// All valid handles.
#[derive(Debug, Default)]
pub struct Shares {
    tokens: Mutex<HashMap<Token, Share>>,
    /// Memory of the sessions that are being restored, by first address.
    restored: Mutex<HashMap<u64, Weak<Grant>>>,
}

impl Shares {
    /// Notes memory of a session that is being restored.
    pub fn note_restored(&self, grant: &Arc<Grant>) {
        let mut restored = self.restored.lock();
        restored.insert(grant.start, Arc::downgrade(grant));
    }

    /// The memory of a session that has been restored; `None` if its owner has ended or freed it.
    pub fn restored(&self, start: u64) -> Option<Arc<Grant>> {
        self.restored.lock().get(&start)?.upgrade()
    }

    /// Ends the restoring of sessions: clears the list of [`Shares::note_restored`].
    pub fn end_restoring(&self) {
        self.restored.lock().clear();
    }
}

/// Another session's memory that this session has open.
#[derive(Debug)]
struct Opened {
    len: u64,
    grant: Arc<Grant>,
    /// Number of closes still required.
    count: u32,
    /// Devices for which it was opened.
    users: BTreeSet<Ordinal>,
}

/// Memory of another session that a session has open.
pub struct Open<'a> {
    /// Bytes.
    pub len: u64,
    /// The grant that it is a part of.
    pub grant: &'a Arc<Grant>,
    /// Number of closes still required.
    pub count: u32,
    /// Devices for which it was opened.
    pub users: &'a BTreeSet<Ordinal>,
}

/// The memory that a session shares, and the memory it has open.
#[derive(Debug, Default)]
pub struct Sharing {
    given: BTreeMap<u64, (u64, Token)>,
    opened: BTreeMap<u64, Opened>,
}

fn handle_of(token: &Token) -> [u8; 64] {
    let mut handle = [0; 64];
    handle[..16].copy_from_slice(&MAGIC);
    handle[16..48].copy_from_slice(token);
    handle
}

fn token_of(handle: &[u8; 64]) -> Option<Token> {
    (handle[..16] == MAGIC && handle[48..] == [0; 16])
        .then(|| handle[16..48].try_into().ok())
        .flatten()
}

fn random() -> Result<Token, CUresult> {
    let mut token = [0; 32];
    // SAFETY: writes as many bytes as the buffer has.
    let got = unsafe { libc::getrandom(token.as_mut_ptr().cast(), token.len(), 0) };
    if got as usize == token.len() {
        Ok(token)
    } else {
        Err(CUDA_ERROR_OPERATING_SYSTEM)
    }
}

impl Sharing {
    /// Whether nothing is shared or open.
    #[cfg(test)]
    pub fn is_untouched(&self) -> bool {
        self.given.is_empty() && self.opened.is_empty()
    }

    /// Returns the handle of `[start, start + len)`, which must lie in a grant of the session. Repeated calls return
    /// the same handle.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if too many ranges are shared.
    pub fn share(
        &mut self,
        shares: &Shares,
        (session, uid): (u64, u32),
        (start, len): (u64, u64),
        grant: &Arc<Grant>,
    ) -> Result<[u8; 64], CUresult> {
        if let Some((given, token)) = self.given.get(&start)
            && *given == len
        {
            return Ok(handle_of(token));
        }
        self.forget(shares, start);
        if self.given.len() >= bounds::SHARED {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let token = random()?;
        self.give_as(shares, (session, uid), (start, len, token), grant);
        Ok(handle_of(&token))
    }

    /// Invalidates the handle of the allocation at `start`, which is being freed.
    pub fn forget(&mut self, shares: &Shares, start: u64) {
        if let Some((_, token)) = self.given.remove(&start) {
            shares.tokens.lock().remove(&token);
        }
    }

    /// Opens the memory of a handle. Returns its start address, its length in bytes and its grant.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for an invalid or revoked handle, or one of another user;
    /// `CUDA_ERROR_INVALID_CONTEXT` for a handle of this session; `CUDA_ERROR_ALREADY_MAPPED` if an earlier share of
    /// the same address is still open; `CUDA_ERROR_OUT_OF_MEMORY` if too many ranges are open or the account exceeds
    /// its limit.
    pub fn open(
        &mut self,
        shares: &Shares,
        (session, uid): (u64, u32),
        account: &Account,
        handle: &[u8; 64],
    ) -> Result<(u64, u64, Arc<Grant>), CUresult> {
        let token = token_of(handle).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let (start, len, grant) = {
            let shares = shares.tokens.lock();
            let share = shares.get(&token).ok_or(CUDA_ERROR_INVALID_VALUE)?;
            if share.uid != uid {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            if share.session == session {
                return Err(CUDA_ERROR_INVALID_CONTEXT);
            }
            let grant = share.grant.upgrade().ok_or(CUDA_ERROR_INVALID_VALUE)?;
            (share.start, share.len, grant)
        };
        let held = grant.clone();
        let full = self.opened.len() >= bounds::OPENED;
        match self.opened.get_mut(&start) {
            Some(opened) if Arc::ptr_eq(&opened.grant, &grant) && opened.len == len => {
                opened.count += 1;
            }
            // The range was freed and shared anew while an earlier share of the same address is still open.
            Some(_) => return Err(CUDA_ERROR_ALREADY_MAPPED),
            None if full => return Err(CUDA_ERROR_OUT_OF_MEMORY),
            // The allocating session is charged while it holds the grant. After that its openers are charged, even
            // beyond their limits; a session already over its limit may therefore not open more.
            None if account.is_over(Memory::Device(grant.device)) => {
                return Err(CUDA_ERROR_OUT_OF_MEMORY);
            }
            None => self.note_opened(account, (start, len), grant, (1, BTreeSet::new())),
        }
        Ok((start, len, held))
    }

    /// The token of the memory that is shared from `start` on, and its bytes.
    pub fn given(&self, start: u64) -> Option<(u64, Token)> {
        self.given.get(&start).copied()
    }

    /// The memory of another session that is open from `start` on.
    pub fn opened(&self, start: u64) -> Option<Open<'_>> {
        self.opened.get(&start).map(|opened| Open {
            len: opened.len,
            grant: &opened.grant,
            count: opened.count,
            users: &opened.users,
        })
    }

    /// Notes a device for which memory of another session was opened.
    pub fn note_user(&mut self, start: u64, device: Ordinal) {
        if let Some(opened) = self.opened.get_mut(&start) {
            opened.users.insert(device);
        }
    }

    /// Shares memory under this token, which it may have had in an earlier server.
    pub fn give_as(
        &mut self,
        shares: &Shares,
        (session, uid): (u64, u32),
        (start, len, token): (u64, u64, Token),
        grant: &Arc<Grant>,
    ) {
        let share = Share {
            session,
            uid,
            start,
            len,
            grant: Arc::downgrade(grant),
        };
        shares.tokens.lock().insert(token, share);
        self.given.insert(start, (len, token));
    }

    /// Notes memory as opened this many times, for these devices; an earlier server may have opened it.
    pub fn note_opened(
        &mut self,
        account: &Account,
        (start, len): (u64, u64),
        grant: Arc<Grant>,
        (count, users): (u32, BTreeSet<Ordinal>),
    ) {
        grant.opened_by(account);
        let opened = Opened {
            len,
            grant,
            count,
            users,
        };
        self.opened.insert(start, opened);
    }

    /// Closes the memory that begins at `start`. Returns the grant if this was the last close.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if no open memory begins there.
    pub fn close(&mut self, start: u64) -> Result<Option<Arc<Grant>>, CUresult> {
        let opened = self
            .opened
            .get_mut(&start)
            .ok_or(CUDA_ERROR_INVALID_VALUE)?;
        opened.count -= 1;
        if opened.count > 0 {
            return Ok(None);
        }
        Ok(self.opened.remove(&start).map(|opened| opened.grant))
    }

    /// Whether `[address, address + len)` lies in memory that is open.
    pub fn contains(&self, address: u64, len: u64) -> bool {
        self.opened
            .range(..=address)
            .next_back()
            .is_some_and(|(start, opened)| {
                address - start < opened.len && len <= opened.len - (address - start)
            })
    }

    /// Invalidates all handles and closes all memory. Returns the grants that were open.
    pub fn clear(&mut self, shares: &Shares) -> Vec<Arc<Grant>> {
        let mut all = shares.tokens.lock();
        for (_, token) in std::mem::take(&mut self.given).into_values() {
            all.remove(&token);
        }
        let opened = std::mem::take(&mut self.opened);
        opened.into_values().map(|opened| opened.grant).collect()
    }
}
