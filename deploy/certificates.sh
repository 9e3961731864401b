#!/bin/sh
# Make certificates for a trial: an authority, one of the daemon and one of a client, valid for 30 days.
#
#   certificates.sh DIRECTORY CLIENT HOST...
#
# DIRECTORY is created. CLIENT is the subject alternative name of the client's certificate (`san` of a
# principal). Each HOST is a name or an IP address of the daemon, as clients write it. A cache that is to last
# needs the certificates of your own authority; ca.key can sign any others and belongs on no server.
set -eu
umask 077

[ $# -ge 3 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
directory=$1 client=$2
shift 2
mkdir "$directory"
cd "$directory"

names=
for host in "$@"; do
  case $host in
    *:*) kind=IP ;;
    *[!0-9.]*) kind=DNS ;;
    *) kind=IP ;;
  esac
  names=${names:+$names,}$kind:$host
done

key() {  # file
  openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2> /dev/null
}

signed() {  # name, subject alternative names, extended key usage
  key "$1.key"
  printf '%s\n' "basicConstraints=critical,CA:FALSE" "keyUsage=critical,digitalSignature" \
    "extendedKeyUsage=$3" "subjectAltName=$2" > "$1.cnf"
  openssl req -new -key "$1.key" -subj "/CN=tiercache trial $1" |
    openssl x509 -req -CA ca.pem -CAkey ca.key -set_serial "0x$(openssl rand -hex 16)" -days 30 -sha256 \
      -extfile "$1.cnf" -out "$1.pem" 2> /dev/null
  rm "$1.cnf"
}

key ca.key
openssl req -x509 -new -key ca.key -sha256 -days 30 -subj "/CN=tiercache trial authority" \
  -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign" -out ca.pem
signed server "$names" serverAuth
signed client "DNS:$client" clientAuth
chmod 644 ca.pem server.pem client.pem
