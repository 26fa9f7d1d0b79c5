// Publishes four messages with nsqjs and consumes them, requeuing one; run where nsqjs is installed.

const fs = require('fs')
const path = require('path')
const { createRequire } = require('module')

const given = JSON.parse(process.argv[2])
const nsq = createRequire(path.join(given.modules, 'index.js'))('nsqjs')

const [host, port] = given.nsqd.split(':')
const options = { snappy: given.layers.includes('snappy'), deflate: given.layers.includes('deflate') }
if (given.layers.includes('tls_v1')) {
  Object.assign(options, { tls: true, ca: fs.readFileSync(given.ca) })
}
const where = given.lookup ? { lookupdHTTPAddresses: [given.lookupd], lookupdPollInterval: 1 } : { nsqdTCPAddresses: [given.nsqd] }
const seen = []

function fail(error) {
  console.error(String(error))
  process.exit(1)
}

const writer = new nsq.Writer(host, Number(port), options)
const reader = new nsq.Reader(given.topic, 'ch', { maxInFlight: 5, ...where, ...options })

reader.on('error', fail)
reader.on('message', (message) => {
  seen.push([message.body.toString(), message.attempts, Number(process.hrtime.bigint()) / 1e9])
  if (message.body.toString() === 'again' && message.attempts === 1) {
    message.requeue(300, false)
    return
  }
  message.finish()
  if (seen.length === 5) {
    setTimeout(() => process.stdout.write(JSON.stringify(seen), () => process.exit(0)), 100)
  }
})

writer.on('error', fail)
writer.on('ready', () => {
  writer.publish(given.topic, 'again', (error) => {
    if (error) fail(error)
    writer.publish(given.topic, ['one', 'two', 'three'], (refusal) => {
      if (refusal) fail(refusal)
      reader.connect()
    })
  })
})
writer.connect()
