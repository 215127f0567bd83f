//! Owns: requests to the kernel's rtnetlink.
use crate::NetError;
/// A socket.
pub struct Netlink;
impl Netlink {
    pub fn open() -> Result<Self, NetError> {
        Ok(Netlink)
    }
    pub fn set_up(&mut self, name: &str) -> Result<(), NetError> {
        Err(NetError::NoInterface { name: name.to_owned() })
    }
}
